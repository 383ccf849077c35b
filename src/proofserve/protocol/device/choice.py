"""Whether the kernels can run for a device: the only question that the other modules ask."""

import subprocess
from typing import Protocol

import torch
from torch import Tensor


class Kernels(Protocol):
    """What the module ``kernels`` offers. All tensors are on one device."""

    def fill_normal(self, out: Tensor, seeds: Tensor) -> None:
        """``draws.fill_normal`` with ``seeds`` int32 [b] as bit patterns."""

    def hash_keys(self, seeds: Tensor, keys: Tensor) -> Tensor:
        """As ``murmur.hash_keys``."""

    def rotate(self, x: Tensor, steps: Tensor) -> Tensor:
        """As ``transforms.rotate``, of float32."""


def kernels_for(device: torch.device) -> Kernels | None:
    """The kernels for tensors on ``device``, None where torch's own operations must do.

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
