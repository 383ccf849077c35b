"""Numbers in few bits, in the formats that serving engines and files use.

A rounding takes float32 values and gives rounded float32 values of the same shape. The last axis is
the input of a matrix; values that share a scale lie side by side along it. The functions named
``from_...`` give the matrix [..., out, in] in float32 that stored parts mean; they raise ValueError
for parts that do not fit each other.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Rounding = Callable[[Tensor], Tensor]
EightBitKind = Literal["int8", "fp8"]
# How a value becomes an integer: divided by its scale, times the scale's inverse, or times the
# largest integer over the largest value. They differ by an integer where a value is near a tie.
Scaling = Literal["division", "inverse", "largest"]
# The parts of a stored matrix by their role: "weight", "scale", "zero", "groups", "shape".
Parts = Mapping[str, Tensor]
# How many rows and columns of a matrix share a scale; None for all of them.
Block = tuple[int | None, int | None]

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


def integers(bits: int, scaling: Scaling = "division") -> Rounding:
    """Signed integers, symmetric: the largest magnitude of the last axis is the largest integer."""
    most = 2 ** (bits - 1) - 1

    def rounded(values: Tensor) -> Tensor:
        scale = (largest := _largest(values)) / most
        if scaling == "division":
            numbers = values / scale
        else:
            numbers = values * (1.0 / scale if scaling == "inverse" else most / largest)
        made: Tensor = numbers.round() * scale
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
    return _into_fp8(values, _largest(values) / _FP8_MAX)


def fp8_unscaled(values: Tensor, *, cut: bool = False) -> Tensor:
    """float8 e4m3 without a scale, as vLLM keeps keys and values by default.

    The nearest number, or with ``cut`` the next one towards zero.
    """
    nearest = values.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    if not cut:
        return nearest.float()
    # The bytes of one sign rise with the magnitude.
    is_above = nearest.float().abs() > values.abs()
    return (nearest.view(torch.uint8) - is_above.byte()).view(torch.float8_e4m3fn).float()


@dataclass(frozen=True, slots=True)
class EightBits:
    """How activations are rounded to 8 bits before a matrix multiplies them.

    A token's values have one scale, or one for each ``group`` of them, so that the largest becomes
    the largest number; with ``powers_of_two`` scales are rounded up to one. ``scale`` is a scale
    that the checkpoint holds, for all tokens.
    """

    kind: EightBitKind
    group: int | None = None
    powers_of_two: bool = False
    scale: float | None = None

    @property
    def text(self) -> str:
        if self.scale is not None:
            return f"{self.kind} with a stored scale"
        powers = " with powers of two as scales" if self.powers_of_two else ""
        return f"{self.kind} per {f'group of {self.group}' if self.group else 'token'}{powers}"

    def rounding(self, scaling: Scaling = "division") -> Rounding:
        """``scaling`` is how a kernel makes integers of values by a scale of their own."""
        if self.scale is not None:
            stored = torch.tensor(self.scale)
            if self.kind == "fp8":
                return partial(_into_fp8, scale=stored)
            return lambda values: (values / stored).round().clamp(-128, 127) * stored
        by_scale = fp8_by_powers if self.powers_of_two else fp8
        whole = integers(8, scaling) if self.kind == "int8" else by_scale
        return in_groups(whole, self.group) if self.group else whole


def fp8_by_powers(values: Tensor) -> Tensor:
    """As ``fp8`` with the next larger power of two as the scale: DeepSeek's ``ue8m0``."""
    fraction, power = torch.frexp(_largest(values) / _FP8_MAX)
    # A power of two itself is half of the next one.
    scale = torch.ldexp(torch.ones_like(fraction), power - (fraction == 0.5).int())
    return _into_fp8(values, scale)


def _into_fp8(values: Tensor, scale: Tensor) -> Tensor:
    return fp8_unscaled(values / scale) * scale


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


# -- what is stored --------------------------------------------------------------------------------


def from_bytes(parts: Parts, block: Block) -> Tensor:
    """Of int8 or float8 e4m3 [..., out, in]: each number, less its zero point, times its scale.

    See compressed-tensors, ``compressors/naive_quantized/base.py``, and transformers,
    ``integrations/finegrained_fp8.py``. Scales are one, [..., out], or as ``Block`` says; the last
    blocks may be cut off by the matrix's edge.
    """
    values = parts["weight"]
    if values.dtype not in {torch.int8, torch.float8_e4m3fn}:
        raise ValueError(f"numbers are {values.dtype}, not int8 or float8_e4m3fn")
    zero = parts["zero"].float() if "zero" in parts else None
    return _scaled(values.float(), zero, parts, block)


def from_packed_integers(parts: Parts, bits: int, block: Block) -> Tensor:
    """Of integers [out, in], packed along the input, and zero points packed along the output.

    See compressed-tensors, ``compressors/pack_quantized``: the lowest bits come first, and what is
    stored is an integer plus half of the range. "shape" holds the two sizes.
    """
    rows, columns = shape = torch.Size(parts["shape"].tolist())
    packed, half = parts["weight"], 2 ** (bits - 1)
    if packed.shape != (rows, math.ceil(columns * bits / 32)):
        raise ValueError(f"packed numbers {[*packed.shape]} do not fit a matrix {[*shape]}")
    values = (_unpacked(packed, bits)[:, :columns] - half).float()
    zero = None
    if "zero" in parts:
        zero = (_unpacked(parts["zero"].mT, bits).mT[:rows] - half).float()
    return _scaled(values, zero, parts, block)


def from_mxfp4(parts: Parts) -> Tensor:
    """Of blocks uint8 [experts, out, groups, 16] and scales uint8 [experts, out, groups].

    Gives [experts, in, out], as gpt-oss has its experts. See transformers,
    ``integrations/mxfp4.py``: a byte holds two numbers, the first in its lower half; a scale means
    2 ** (scale - 127).
    """
    blocks, scales = parts["weight"], parts["scale"]
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"blocks and scales are {blocks.dtype} and {scales.dtype}, not bytes")
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
        raise ValueError(f"scales {[*scales.shape]} do not fit blocks {[*blocks.shape]}")
    table = torch.cat([_FP4, -_FP4]).to(blocks.device)
    values = table[torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).int()]
    power = scales.to(torch.int32).unsqueeze(-1) - 127
    return torch.ldexp(values, power).flatten(-2).mT.contiguous()


def from_awq(parts: Parts, size: int) -> Tensor:
    """Of 4-bit numbers [in, out] and zero points [groups, out], both packed along the output.

    A group has ``size`` inputs, or all for -1. See AutoAWQ, ``awq/modules/linear/gemm.py``.
    """
    # Where the layout puts the eight outputs of an int32: by place, from the lowest bits on.
    places = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]).argsort()
    values, zero = (
        torch.unflatten(_unpacked(parts[role], 4), -1, (-1, 8))[..., places].flatten(-2)
        for role in ("weight", "zero")
    )
    return _of_columns(values, zero, parts["scale"], _in_order(len(values), size))


def from_gptq(parts: Parts, bits: int, size: int, *, old: bool, symmetric: bool) -> Tensor:
    """Of numbers [in, out], packed along the input, and zero points packed along the output.

    A group has ``size`` inputs, or "groups" [in] says the group of each. The ``old`` format stores
    zero points less one. See AutoGPTQ, ``nn_modules/qlinear/qlinear_cuda_old.py``, and vLLM,
    ``csrc/quantization/gptq/q_gemm.cu``. Raises ValueError also where kernels differ.
    """
    values = _unpacked(parts["weight"].mT, bits).mT
    zero = _unpacked(parts["zero"], bits)[:, : values.shape[1]] + int(old)
    if symmetric and not bool((zero == 2 ** (bits - 1)).all()):
        # vLLM's Marlin kernels do not read the zero points of symmetric formats.
        raise ValueError("sym is true, and zero points are not the middle of the range")
    if int(zero.max()) == 2**bits:
        raise ValueError(f"a zero point is {2**bits}, which some kernels read as 0")
    groups = parts["groups"] if "groups" in parts else _in_order(len(values), size)
    return _of_columns(values, zero, parts["scale"], groups)


def _scaled(values: Tensor, zero: Tensor | None, parts: Parts, block: Block) -> Tensor:
    """(values - zero) * scale, where a ``block`` shares both, or inputs of the same group."""
    scale, groups = parts["scale"], parts.get("groups")
    if not scale.is_floating_point():
        raise ValueError(f"scales are {scale.dtype}, not floats")
    scale = scale.float()
    if scale.numel() == 1:
        # One scale fits every block.
        scale, block = scale.reshape([1] * values.ndim), (None, None)
    elif scale.ndim == values.ndim - 1:
        scale = scale.unsqueeze(-1)

    def spread(of: Tensor) -> Tensor:
        # The library writes -1 where inputs are in the order of their groups.
        if groups is None or bool((groups == -1).all()):
            return _spread(of, values.shape, block)
        return of[..., _checked(groups, of.shape[-1], values.shape[-1])]

    if zero is not None:
        values = values - spread(zero.reshape(scale.shape))
    return values * spread(scale)


def _spread(scales: Tensor, shape: torch.Size, block: Block) -> Tensor:
    """Scales [..., rows / tall, columns / wide] as they multiply a matrix of ``shape``."""
    rows, columns = shape[-2:]
    tall, wide = block[0] or rows, block[1] or columns
    expected = (*shape[:-2], math.ceil(rows / tall), math.ceil(columns / wide))
    if scales.shape != expected:
        raise ValueError(f"scales are {[*scales.shape]}, not {[*expected]}")
    if tall < rows and tall > 1:
        scales = scales.repeat_interleave(tall, dim=-2)[..., :rows, :]
    return scales if wide >= columns else scales.repeat_interleave(wide, dim=-1)[..., :columns]


def _of_columns(values: Tensor, zero: Tensor, scale: Tensor, groups: Tensor) -> Tensor:
    """[out, in] of numbers [in, out], less zero points [groups, out], times scales as these."""
    if zero.shape != scale.shape or scale.shape[1] != values.shape[1]:
        found = f"scales {[*scale.shape]} and zero points {[*zero.shape]}"
        raise ValueError(f"{found} do not fit numbers {[*values.shape]}")
    places = _checked(groups, len(scale), len(values))
    made: Tensor = (values - zero[places]).float() * scale.float()[places]
    return made.mT.contiguous()


def _in_order(inputs: int, size: int) -> Tensor:
    """The group of each input, int64 [inputs]."""
    return torch.arange(inputs) // (size if size > 0 else inputs)


def _checked(groups: Tensor, count: int, inputs: int) -> Tensor:
    """``groups`` as places among ``count`` scales, for each of the ``inputs``."""
    if groups.shape != (inputs,) or int(groups.min()) < 0 or int(groups.max()) != count - 1:
        raise ValueError(f"groups of {len(groups)} for {inputs} inputs do not fit {count} scales")
    return groups.long()


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """int32 [..., n] as int32 [..., n * 32 / bits] without signs, from the lowest bits on."""
    if packed.dtype != torch.int32:
        raise ValueError(f"packed numbers are {packed.dtype}, not int32")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    made: Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return made.flatten(-2)
