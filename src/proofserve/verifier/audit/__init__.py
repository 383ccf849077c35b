"""Attacks on a deployment, and how many nonces convict them."""
