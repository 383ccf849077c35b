"""Attacks on a deployment, and what it takes to convict them."""
