"""What a node does with proofs: rounds, jobs and validation. Plain asyncio, no framework."""
