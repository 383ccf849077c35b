"""What every HTTP server of this package shares."""
