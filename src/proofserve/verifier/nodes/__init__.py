"""A node judged by other nodes: nothing is recomputed here, and no weights are needed."""
