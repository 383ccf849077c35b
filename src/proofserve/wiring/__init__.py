"""Builds the objects of a process and hands them to each other."""
