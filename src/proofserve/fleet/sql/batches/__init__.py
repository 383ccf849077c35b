"""Members' callbacks: stored as one row each, and read as results."""
