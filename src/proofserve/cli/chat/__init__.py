"""Commands about chat answers."""
