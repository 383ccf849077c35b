"""Which versions of vLLM are vetted, and whether another one has every name that we rely on."""
