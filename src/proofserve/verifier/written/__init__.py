"""Who wrote the tokens of answers: one test for receipts (``chat``) and for ``probe``."""
