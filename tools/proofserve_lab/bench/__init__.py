"""Benchmarks: the speed of proofs, and what they cost chat."""
