"""``proofserve fleet``: the controller of a fleet, and what operators ask of it."""
