"""One module for each version of the tables."""
