"""The vLLM servers behind the gateway: their health, their connections, the choice among them."""
