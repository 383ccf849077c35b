"""A checkpoint as the validator of chat answers."""
