"""Receipts of chat answers and their log, in the outbox's file, and the key that signs them."""
