"""A node's part in a fleet: it joins by itself, and shows that it lives."""
