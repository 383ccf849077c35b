"""Published artifacts against our own recomputation."""
