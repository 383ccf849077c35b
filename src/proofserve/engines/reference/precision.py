"""Weights rounded to fewer bits, and weights drawn at random."""

import torch
from torch import Tensor
from torch.nn import functional

# Weights that share a scale, as in the usual 4-bit formats. Small groups lose least by rounding.
GROUP = 32


def to_bits(weight: Tensor, bits: int) -> Tensor:
    """``weight`` [..., in] rounded to ``bits`` of a signed integer, in its own dtype.

    Symmetric, to the nearest, with one scale for each ``GROUP`` values along the last axis: the
    largest magnitude of a group is the largest integer. Raises ValueError for less than 2 bits.
    """
    if bits < 2:
        raise ValueError(f"{bits} bits hold no signed integer")
    most = 2 ** (bits - 1) - 1
    length = weight.shape[-1]
    # Zeros fill up the last group; they are never its largest magnitude.
    filled = functional.pad(weight.float(), (0, -length % GROUP))
    groups = filled.reshape(-1, GROUP)
    scale = _largest(groups) / most
    rounded: Tensor = (groups / scale).round_().mul_(scale).reshape(filled.shape)
    return rounded[..., :length].to(weight.dtype)


def to_fp8(weight: Tensor) -> Tensor:
    """``weight`` [..., out, in] rounded to float8 e4m3, in its own dtype; a scale for each row."""
    exact = weight.float()
    scale = _largest(exact) / torch.finfo(torch.float8_e4m3fn).max
    rounded = (exact / scale).to(torch.float8_e4m3fn).float()
    return (rounded * scale).to(weight.dtype)


def redrawn(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers of the mean and deviation of ``weight``, in its shape and dtype.

    ``generator`` is of the CPU, so that a seed means the same on every device.
    """
    exact = weight.float()
    drawn = torch.randn(weight.shape, generator=generator).to(weight.device)
    return (exact.mean() + exact.std() * drawn).to(weight.dtype)


def _largest(values: Tensor) -> Tensor:
    """The largest magnitude along the last axis [..., 1]; a tiny number for a row of zeros."""
    tiny = torch.finfo(torch.float32).tiny
    return values.abs().amax(dim=-1, keepdim=True).clamp_min(tiny)
