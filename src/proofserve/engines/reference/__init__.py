"""The deployed model in plain transformers, for validators: no vLLM, on a CPU or a GPU."""
