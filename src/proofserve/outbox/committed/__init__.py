"""Rounds that publish roots: their batches as rows, and the vectors under a root."""
