"""HTTP routes of a fleet that a node does not have."""
