"""vLLM servers of several processes."""
