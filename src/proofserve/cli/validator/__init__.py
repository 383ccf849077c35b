"""Commands of a validator about a node that runs."""
