"""What a node signs about a chat answer, and how it is checked (``docs/receipts.md``)."""
