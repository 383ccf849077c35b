"""The adapter to a real vLLM. Only it, the packages beside it, and ``plugin`` import vLLM."""
