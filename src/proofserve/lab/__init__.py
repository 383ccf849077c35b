"""Measures a running node from outside, and checks that it does what the documents say."""
