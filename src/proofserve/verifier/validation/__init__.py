"""Many nodes judged again and again: a ledger, and judges that share passes over the weights."""
