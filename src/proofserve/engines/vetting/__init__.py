"""What a server checks at its start: vLLM's version or names, and that all ranks are alike."""
