"""Checks chat answers by their receipts (``docs/receipts.md``)."""
