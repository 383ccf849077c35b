"""Measures proofserve's gateway beside its peers. See README.md in this folder."""
