"""From claims and their recomputation to a verdict: counts, sizes and directions of errors."""
