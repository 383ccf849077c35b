"""The deployed model in plain transformers, for those who verify: no vLLM, CPU or GPU."""
