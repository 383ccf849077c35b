"""Keeps results and callbacks on disk, and sends the callbacks until they are acknowledged."""
