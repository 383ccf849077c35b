"""Servers of others, as our programs see them: nodes, their answers, and what they owe."""
