"""Measures the fleet's store: how many artifacts of members' callbacks it takes in a second."""
