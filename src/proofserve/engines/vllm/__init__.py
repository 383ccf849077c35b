"""The adapter to a real vLLM: the only package, with ``plugin``, that imports it."""
