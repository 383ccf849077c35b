"""Commands of a validator: what honest nodes look like, and whether one is honest."""
