"""A server that stores callbacks, to try a node or to watch it."""
