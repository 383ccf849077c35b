"""Whether the kernels can run for a device: the only question that the other modules ask."""

import subprocess
from types import ModuleType

import torch


def kernels_for(device: torch.device) -> ModuleType | None:
    """The module ``kernels`` for tensors on ``device``, None where torch's own operations must do.

    They need a CUDA device, Triton, and the C compiler with which Triton builds its driver once.
    """
    if device.type != "cuda":
        return None
    try:
        from proofserve.protocol.device import kernels  # noqa: PLC0415 - imports Triton

        kernels.require_driver()
    except (ImportError, RuntimeError, OSError, AssertionError, subprocess.SubprocessError):
        # Triton is missing, or found no compiler, no Python headers or no libcuda.
        return None
    return kernels
