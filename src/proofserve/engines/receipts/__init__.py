"""Receipts for chat, inside a real vLLM: a sketch for each output token, and the ended answers."""
