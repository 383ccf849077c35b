"""Brings the members to what is desired: a pure plan, its actions, and the loop of the leader."""
