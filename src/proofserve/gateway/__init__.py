"""An HTTP gateway with a bounded queue for one or many vLLM servers. It knows nothing of proofs."""
