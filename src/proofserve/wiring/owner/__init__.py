"""Several API server processes with one node: who owns it, and how the others reach it."""
