"""Which target and which threshold suit a model."""
