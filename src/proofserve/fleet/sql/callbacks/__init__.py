"""Callbacks from the fleet to the network, as rows and as bodies."""
