"""A bounded, streaming front door for one or many vLLM servers. It knows nothing of proofs."""
