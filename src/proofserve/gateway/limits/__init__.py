"""What one client and all clients together may use: permits, queue, budgets."""
