"""Small checkpoints with seeded random weights, for a machine that cannot download real ones."""
