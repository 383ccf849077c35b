"""At the start of a server: every rank, on whatever machine, must have the same proofserve."""
