"""A client of a node and of its chat: requests, records, waiting, progress."""
