"""Proofs of compute from an unmodified vLLM server, in the time that chat leaves free."""

__version__ = "0.1.0"
