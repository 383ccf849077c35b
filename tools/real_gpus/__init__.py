"""Vectors that real GPUs published, and how verdicts by other nodes would have judged each."""
