"""Receipts of chat answers and their log over HTTP."""
