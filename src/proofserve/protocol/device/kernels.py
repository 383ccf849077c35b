"""The kernels, in Triton. Importing this module needs Triton; ``choice`` says whether to.

Each does the arithmetic of the torch code that it stands for, in the same order and in the same
types, and the compiler joins no operations. Integers, and uniform numbers, are the same bits.
Logarithm, sine and cosine are those of CUDA's libdevice, and the square root is rounded to nearest,
as torch's own are on a CUDA device; a sum adds up in another order.

Annotations of kernels are text, because Triton reads them as code of the kernel.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers per program, at most.
_LARGEST_BLOCK = 1024
_SMALLEST_BLOCK = 16
# A row of a rotation stays in the registers of one program.
_NUMBERS_PER_WARP = 256
_MOST_WARPS = 16

_PER_HASH = tl.constexpr(2.0**-32)
# float32(2*pi), bits 0x40c90fdb, by 2^-32, which is exact.
_ANGLE_PER_HASH = tl.constexpr(6.2831854820251465 * 2.0**-32)
_SMALLEST_U1 = tl.constexpr(1e-10)


def require_driver() -> None:
    """Raise an error if Triton cannot build or load what it launches kernels with."""
    _ = triton.runtime.driver.active.utils


def fill_normal(out: Tensor, seeds: Tensor) -> None:
    rows, n = out.shape
    block, blocks = _blocks(n - n // 2)
    _launch(_fill_normal, rows * blocks, out, seeds, n, *out.stride(), block=block)


def hash_keys(seeds: Tensor, keys: Tensor) -> Tensor:
    rows, n = len(seeds), len(keys)
    out = torch.empty(rows, n, dtype=torch.int32, device=seeds.device)
    block, blocks = _blocks(n)
    _launch(_hash_keys, rows * blocks, out, seeds, keys.contiguous(), n, block=block)
    return out


def rotate(x: Tensor, steps: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, count, dim = steps.shape
    block = max(_SMALLEST_BLOCK, triton.next_power_of_2(dim))
    warps = min(_MOST_WARPS, max(1, block // _NUMBERS_PER_WARP))
    arguments = x.contiguous(), steps.contiguous(), count, dim
    _launch(_rotate, rows, out, *arguments, block=block, num_warps=warps)
    return out


def _blocks(n: int) -> tuple[int, int]:
    """Numbers per program, a power of two, and how many programs ``n`` numbers need."""
    block = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, triton.next_power_of_2(n)))
    return block, -(-n // block)


def _launch(kernel: Any, programs: int, out: Tensor, *arguments: object, **options: int) -> None:
    if programs:
        # Triton launches on the current device, which may be another one.
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            kernel[(programs,)](out, *arguments, **options, enable_fp_fusion=False)


@triton.jit
def _hash(seed: "Any", key: "Any") -> "Any":
    """H(seed, key) of uint32 (protocol 0.3)."""
    k = key * 0xCC9E2D51
    k = ((k << 15) | (k >> 17)) * 0x1B873593
    h = seed ^ k
    h = ((h << 13) | (h >> 19)) * 5 + 0xE6546B64
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _fill_normal(
    out: "Any", seeds: "Any", n: "Any", row_step: "Any", column_step: "Any", block: tl.constexpr
) -> None:
    """One block of one row: its cosines, and further on its sines (0.5), one fewer if it is odd."""
    sines = n // 2
    pairs = n - sines
    row = tl.program_id(0) // tl.cdiv(pairs, block)
    index = (tl.program_id(0) % tl.cdiv(pairs, block)) * block + tl.arange(0, block)
    seed = tl.load(seeds + row).to(tl.uint32, bitcast=True)
    first = _hash(seed, index.to(tl.uint32)).to(tl.float32)
    second = _hash(seed, (index + pairs).to(tl.uint32)).to(tl.float32)
    radius = tl.sqrt_rn(tl.log(tl.maximum(first * _PER_HASH, _SMALLEST_U1)) * -2.0)
    angle = second * _ANGLE_PER_HASH
    start = out + row.to(tl.int64) * row_step
    cosine_places = start + index.to(tl.int64) * column_step
    sine_places = start + (index.to(tl.int64) + pairs) * column_step
    tl.store(cosine_places, radius * tl.cos(angle), mask=index < pairs)
    tl.store(sine_places, radius * tl.sin(angle), mask=index < sines)


@triton.jit
def _hash_keys(out: "Any", seeds: "Any", keys: "Any", n: "Any", block: tl.constexpr) -> None:
    row = tl.program_id(0) // tl.cdiv(n, block)
    index = (tl.program_id(0) % tl.cdiv(n, block)) * block + tl.arange(0, block)
    seed = tl.load(seeds + row).to(tl.uint32, bitcast=True)
    key = tl.load(keys + index, mask=index < n, other=0).to(tl.uint32, bitcast=True)
    hashed = _hash(seed, key).to(tl.int32, bitcast=True)
    tl.store(out + row.to(tl.int64) * n + index, hashed, mask=index < n)


@triton.jit
def _rotate(
    out: "Any", x: "Any", steps: "Any", count: "Any", dim: "Any", block: tl.constexpr
) -> None:
    """One row of ``dim`` numbers, reflected ``count`` times (0.7)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < dim
    value = tl.load(x + row * dim + column, mask=inside, other=0.0)
    for step in range(count):
        v = tl.load(steps + (row * count + step) * dim + column, mask=inside, other=0.0)
        value = value - 2 * tl.sum(value * v) * v
    tl.store(out + row * dim + column, value, mask=inside)
