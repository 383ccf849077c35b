"""Compares proofserve's gateway with other gateways. See README.md in this folder."""
