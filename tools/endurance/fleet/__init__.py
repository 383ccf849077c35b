"""Kills the parts of a fleet at random, and accounts for every proof and every verdict."""
