"""Jobs of a fleet: its members as one engine."""
