"""The page that shows a node, a gateway or a fleet; each hands in how its state is read."""
