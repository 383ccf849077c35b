"""Figures with limits, the machine they are from, and reports for people and programs."""
