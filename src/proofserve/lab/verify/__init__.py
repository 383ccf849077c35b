"""Checks published artifacts by our own recomputation of them."""
