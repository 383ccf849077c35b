"""Entry points that vLLM loads."""
