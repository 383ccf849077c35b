"""What the protocol does otherwise on a CUDA device: one kernel for many, and copies (ADR 29).

``choice`` and ``copies`` may be imported anywhere; ``kernels`` needs Triton.
"""
