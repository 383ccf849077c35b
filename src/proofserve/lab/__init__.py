"""Measures a running node from outside, and checks that it keeps its promises."""
