"""How drawn numbers get from the CPU to the device."""

import torch
from torch import Tensor


def to_device(drawn: Tensor, device: torch.device) -> Tensor:
    """``drawn`` from the CPU on ``device``, without waiting for what the device computes.

    An ordinary copy to a CUDA device waits for all that was launched before, so the numbers of a
    finish would be drawn while the device has nothing to do. A copy from pinned memory does not
    wait.
    """
    if device.type != "cuda":
        return drawn.to(device)
    return drawn.pin_memory().to(device, non_blocking=True)
