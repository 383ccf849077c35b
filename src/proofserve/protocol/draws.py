"""Uniform and normal numbers and unit vectors from seeds, by one hash (protocol 0.3 to 0.6).

Torch supports few operations on unsigned integers, so a uint32 is held as the int32 with the same
bits: products and sums wrap in the same way, and a right shift is made logical by masking the
copies of the sign bit. No value of the hash is wider than four bytes.

Everything is batched over seeds and made in tiles, so scratch memory is bounded by a tile and not
by the request. All steps are element-wise: a row is the same, bit for bit, whatever is drawn with
it. On a CUDA device one kernel draws normal numbers, where it can run (``device``).
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from proofserve.protocol.device import kernels_for, to_device
from proofserve.protocol.errors import ProtocolError


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


_KEY_FACTORS = _signed(0xCC9E2D51), _signed(0x1B873593)
_STEP = _signed(0xE6546B64)
_FINAL_FACTORS = _signed(0x85EBCA6B), _signed(0xC2B2AE35)
_SIGN_BIT = _signed(0x80000000)
# Numbers per tile. On a CPU a tile and its temporaries (1 MiB each) stay in the cache, yet are long
# enough to hide the cost of a call; elsewhere large kernels count and a tile only bounds memory.
_CPU_TILE = 2**18
_DEVICE_TILE = 2**24

_PER_HASH = 2.0**-32
_TWO_PI = 6.2831854820251465  # float32(2*pi), bits 0x40c90fdb
_SMALLEST_U1 = 1e-10


def seed_bits(seeds: Sequence[int], device: torch.device) -> Tensor:
    """Seeds 0..2^32-1 as int32 bit patterns [b] on ``device``."""
    return to_device(torch.from_numpy(np.array(seeds, dtype=np.uint32).view(np.int32)), device)


def hash_keys(seeds: Tensor, keys: Tensor) -> Tensor:
    """H(seed, key) for every pair (protocol 0.3).

    ``seeds`` [b] and ``keys`` [n] are int32 bit patterns on one device; the result [b, n] holds
    the int32 bit pattern of each uint32 hash.
    """
    if kernels := kernels_for(seeds.device):
        hashed: Tensor = kernels.hash_keys(seeds, keys)
        return hashed
    return hash_scrambled(seeds, scramble(keys))


def scramble(keys: Tensor) -> Tensor:
    """The half of the hash that depends on the keys alone: int32 [n] -> int32 [n]."""
    first, second = _KEY_FACTORS
    return _rotate_left(keys * first, 15).mul_(second)


def hash_scrambled(seeds: Tensor, scrambled: Tensor) -> Tensor:
    """The half that mixes in the seeds: int32 [b] and scrambled keys [n] -> int32 [b, n]."""
    first, second = _FINAL_FACTORS
    h = _rotate_left(seeds.unsqueeze(-1) ^ scrambled, 13).mul_(5).add_(_STEP)
    _fold(h, 16)
    h.mul_(first)
    _fold(h, 13)
    h.mul_(second)
    _fold(h, 16)
    return h


def as_float32(hashes: Tensor) -> Tensor:
    """The uint32 values behind int32 bit patterns, each rounded once to the nearest even float32.

    Converting from the unsigned view is that one rounding; the signed value plus 2^32 would be two.
    """
    return hashes.view(torch.uint32).to(torch.float32)


def as_ordered(hashes: Tensor) -> Tensor:
    """int32 values that compare as the uint32 hashes do: the hash minus 2^31."""
    return hashes ^ _SIGN_BIT


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    low = (x >> (32 - bits)).bitwise_and_((1 << bits) - 1)
    # The two halves share no bit, so the multiply-add joins them in one pass.
    return low.add_(x, alpha=1 << bits)


def _fold(h: Tensor, bits: int) -> None:
    """h ^= h >>> bits, in place."""
    h ^= (h >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def uniform(seeds: Sequence[int], n: int, device: torch.device) -> Tensor:
    """U(seed, n) for each seed: float32 [b, n] in [0, 1], both ends reachable (protocol 0.4)."""
    out = torch.empty(len(seeds), n, dtype=torch.float32, device=device)
    for rows, columns, (hashes,) in _hash_tiles(seed_bits(seeds, device), n, (0,)):
        torch.mul(as_float32(hashes), _PER_HASH, out=out[rows, columns])
    return out


def normal(
    seeds: Sequence[int], n: int, device: torch.device, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """N(seed, n) for each seed: [b, n], computed in float32 and rounded once (protocol 0.5)."""
    out = torch.empty(len(seeds), n, dtype=out_dtype, device=device)
    fill_normal(out, seeds)
    return out


def fill_normal(out: Tensor, seeds: Sequence[int]) -> None:
    """Write N(seed, n) for each seed into the rows of ``out`` [b, n], of any float dtype.

    Raises ProtocolError for ``n`` when the keys would not fit int32.
    """
    n = out.shape[1]
    pairs = (n + 1) // 2
    _require_int32_keys(2 * pairs)
    if kernels := kernels_for(out.device):
        kernels.fill_normal(out, seed_bits(seeds, out.device))
        return
    cosines, sines = out[:, :pairs], out[:, pairs:]
    for rows, columns, (h1, h2) in _hash_tiles(seed_bits(seeds, out.device), pairs, (0, pairs)):
        radius = as_float32(h1).mul_(_PER_HASH).clamp_(min=_SMALLEST_U1)
        radius.log_().mul_(-2).sqrt_()
        # A power of two commutes with rounding: this is float32(2*pi) * u2, rounded once.
        angle = as_float32(h2).mul_(_TWO_PI * _PER_HASH)
        torch.mul(radius, angle.cos(), out=cosines[rows, columns])
        # An odd n has no room for the last sine.
        sine_part = sines[rows, columns]
        width = sine_part.shape[1]
        torch.mul(radius[:, :width], angle.sin_()[:, :width], out=sine_part)


def unit_vectors(seeds: Sequence[int], dim: int, device: torch.device) -> Tensor:
    """V(s, dim) for each seed: float32 [b, dim] of length 1, without an epsilon (protocol 0.6)."""
    vectors = normal(seeds, dim, device)
    return vectors.div_(torch.linalg.vector_norm(vectors, dim=-1, keepdim=True))


def _hash_tiles(
    seeds: Tensor, n: int, offsets: tuple[int, ...]
) -> Iterator[tuple[slice, slice, list[Tensor]]]:
    """Hashes of the keys offset..offset+n-1 for each offset, tile by tile, as [rows, columns]."""
    _require_int32_keys(max(offsets) + n)
    tile = _CPU_TILE if seeds.device.type == "cpu" else _DEVICE_TILE
    width = max(1, min(n, tile))
    for columns in _spans(n, width):
        keys = [
            scramble(
                torch.arange(
                    offset + columns.start,
                    offset + columns.stop,
                    dtype=torch.int32,
                    device=seeds.device,
                )
            )
            for offset in offsets
        ]
        for rows in _spans(len(seeds), tile // width):
            yield rows, columns, [hash_scrambled(seeds[rows], k) for k in keys]


def _require_int32_keys(count: int) -> None:
    if count > 2**31:
        raise ProtocolError("n", f"{count} numbers per seed exceed the int32 keys")


def _spans(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))
