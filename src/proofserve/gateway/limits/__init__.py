"""Limits of one client and of all clients: permits, queue, budgets."""
