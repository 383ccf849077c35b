"""Kills controllers, members and database of a fleet at random, and accounts for every proof."""
