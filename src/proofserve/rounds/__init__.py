"""Rounds, jobs and validation of a node. Plain asyncio, no framework."""
