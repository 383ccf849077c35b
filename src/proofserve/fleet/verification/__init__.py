"""Verification of members by durable jobs: what is sampled when, the queues, and verdicts."""
