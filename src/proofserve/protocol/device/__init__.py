"""What the protocol does otherwise on a CUDA device: one kernel for many, and copies (ADR 29).

This module may be imported anywhere; ``kernels`` needs Triton.
"""

import subprocess
from types import ModuleType

import torch
from torch import Tensor


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


def to_device(drawn: Tensor, device: torch.device) -> Tensor:
    """``drawn`` from the CPU on ``device``, without waiting for what the device computes.

    An ordinary copy to a CUDA device waits for all that was launched before, so the numbers of a
    finish would be drawn while the device has nothing to do. A copy from pinned memory does not
    wait.
    """
    if device.type != "cuda":
        return drawn.to(device)
    return drawn.pin_memory().to(device, non_blocking=True)
