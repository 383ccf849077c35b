"""Whether each engine core makes progress, read without an answer of the core (ADR 36)."""
