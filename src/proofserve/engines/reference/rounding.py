"""Weights rounded to fewer bits, in the formats that serving engines and files use.

Each function takes float32 values and gives rounded float32 values of the same shape. The last
axis is the input of a matrix; values that share a scale lie side by side along it.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Rounding = Callable[[Tensor], Tensor]

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
# The magnitudes of a 4-bit float with two bits of exponent, and the midpoints between them.
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# The 16 values of NF4: quantiles of the normal distribution, scaled to [-1, 1] (T. Dettmers et al.,
# QLoRA, 2023, appendix E).
_NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ]
)


def in_dtype(rounding: Rounding) -> Rounding:
    """``rounding`` of values of any float dtype, in that dtype."""
    return lambda values: rounding(values.float()).to(values.dtype)


def in_groups(rounding: Rounding, size: int) -> Rounding:
    """``rounding`` of groups [n, size]; zeros fill up the last group of a row."""

    def rounded(values: Tensor) -> Tensor:
        length = values.shape[-1]
        filled = functional.pad(values, (0, -length % size))
        return rounding(filled.reshape(-1, size)).reshape(filled.shape)[..., :length]

    return rounded


def of_whole_matrix(rounding: Rounding) -> Rounding:
    """``rounding`` with one scale for each matrix [..., out, in]."""

    def rounded(values: Tensor) -> Tensor:
        return rounding(values.flatten(-2)).view(values.shape)

    return rounded


def in_blocks(rounding: Rounding, size: int) -> Rounding:
    """``rounding`` with one scale for each square block of a matrix [..., out, in]."""

    def rounded(values: Tensor) -> Tensor:
        rows, columns = values.shape[-2:]
        filled = functional.pad(values, (0, -columns % size, 0, -rows % size))
        tall, wide = filled.shape[-2] // size, filled.shape[-1] // size
        blocks = filled.reshape(-1, tall, size, wide, size).transpose(2, 3)
        done = rounding(blocks.flatten(-2)).view(blocks.shape).transpose(2, 3)
        return done.reshape(filled.shape)[..., :rows, :columns]

    return rounded


def integers(bits: int) -> Rounding:
    """Signed integers, symmetric: the largest magnitude of the last axis is the largest integer."""
    most = 2 ** (bits - 1) - 1

    def rounded(values: Tensor) -> Tensor:
        scale = _largest(values) / most
        made: Tensor = (values / scale).round() * scale
        return made

    return rounded


def shifted_integers(bits: int) -> Rounding:
    """Integers from the smallest to the largest value of the last axis, with a zero point."""
    most = 2**bits - 1

    def rounded(values: Tensor) -> Tensor:
        # Zero itself must be a value, as in the formats that store an integer zero point.
        low = values.amin(dim=-1, keepdim=True).clamp_max(0.0)
        high = values.amax(dim=-1, keepdim=True).clamp_min(0.0)
        scale = _not_zero(high - low) / most
        zero = (-low / scale).round()
        made: Tensor = ((values / scale + zero).round().clamp(0, most) - zero) * scale
        return made

    return rounded


def fp8(values: Tensor) -> Tensor:
    """float8 e4m3 with one scale for the last axis."""
    scale = _largest(values) / _FP8_MAX
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def fp8_unscaled(values: Tensor) -> Tensor:
    """float8 e4m3 without a scale, as vLLM keeps keys and values by default."""
    return values.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).float()


def nf4(values: Tensor) -> Tensor:
    """NF4 with one scale for the last axis."""
    scale = _largest(values)
    return _nearest(values / scale, _NF4) * scale


def mxfp4(values: Tensor) -> Tensor:
    """4-bit floats whose scale is a power of two (OCP Microscaling 1.0, section 6.3)."""
    # The largest fp4 number is 6, in the binade of 4.
    scale = torch.exp2(_largest(values).log2().floor() - 2)
    return _fp4(values / scale) * scale


def nvfp4(values: Tensor) -> Tensor:
    """4-bit floats in groups of 16, whose scales are fp8 numbers times one scale of the matrix."""
    whole = _largest(values.flatten()) / (_FP8_MAX * 6.0)

    def group(part: Tensor) -> Tensor:
        wanted = _largest(part) / 6.0 / whole
        scale = _not_zero(wanted.to(torch.float8_e4m3fn).float()) * whole
        return _fp4(part / scale) * scale

    return in_groups(group, 16)(values)


def rotated(rounding: Rounding, seed: int) -> Rounding:
    """``rounding`` of rows that a rotation drawn by ``seed`` has turned, turned back after it."""

    def rounded(values: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        length = values.shape[-1]
        turn, _ = torch.linalg.qr(torch.randn(length, length, generator=generator))
        turn = turn.to(values.device)
        made: Tensor = rounding(values @ turn) @ turn.T
        return made

    return rounded


def stochastic(bits: int, generator: torch.Generator) -> Rounding:
    """As ``integers``, but up or down by chance, so that the mean of many roundings is exact."""
    most = 2 ** (bits - 1) - 1

    def rounded(values: Tensor) -> Tensor:
        scale = _largest(values) / most
        chance = torch.rand(values.shape, generator=generator).to(values.device)
        made: Tensor = (values / scale + chance).floor() * scale
        return made

    return rounded


def redrawn(values: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers of the mean and deviation of ``values``, in their shape.

    ``generator`` is of the CPU, so that a seed means the same on every device.
    """
    drawn = torch.randn(values.shape, generator=generator).to(values.device)
    return values.mean() + values.std() * drawn


def _fp4(values: Tensor) -> Tensor:
    return _nearest(values.abs().clamp_max(6.0), _FP4) * values.sign()


def _nearest(values: Tensor, allowed: Tensor) -> Tensor:
    """Each value as the nearest of ``allowed``, which rise."""
    table = allowed.to(values.device)
    return table[torch.bucketize(values, (table[1:] + table[:-1]) / 2)]


def _largest(values: Tensor) -> Tensor:
    """The largest magnitude along the last axis [..., 1]; a tiny number for a row of zeros."""
    return _not_zero(values.abs().amax(dim=-1, keepdim=True))


def _not_zero(scale: Tensor) -> Tensor:
    return scale.clamp_min(torch.finfo(torch.float32).tiny)
