"""From finished chat answers to stored, signed and logged receipts."""
