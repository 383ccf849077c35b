"""The vLLM servers behind the gateway: health, connections, and the choice of a backend."""
