"""A verdict about artifacts, and the worker that computes verdicts for a fleet."""
