"""Measures a server from outside, and checks that it does what the documents say."""
