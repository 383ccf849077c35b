"""A Triton backend for CPUs that runs nothing: kernels run in Triton's interpreter.

vLLM's second model runner asks on a CPU for a backend named ``cpu``, which no package index has.
With this folder on PYTHONPATH, and TRITON_INTERPRET=1, Triton finds this one in every process, by
the entry point that the folder's metadata names.
"""
