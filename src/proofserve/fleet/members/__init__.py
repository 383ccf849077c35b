"""Members of a fleet: where they come from, calls to them, and whether they are fit."""
