"""Measures a host with a GPU, step by step, and writes one report: ``make gpu``, docs/gpu.md."""
