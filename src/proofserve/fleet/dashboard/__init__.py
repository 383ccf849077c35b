"""The page of a fleet: what it shows, its history, and what operators may do on it."""
