"""Checks an OpenAI-compatible endpoint that knows nothing of proofs (``docs/customer.md``)."""
