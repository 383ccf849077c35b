"""Uniform and normal numbers and unit vectors from seeds (protocol 0.4 to 0.6).

Everything is batched over seeds and made in tiles, so scratch memory is bounded by a tile and not
by the request. All steps are element-wise: a row is the same, bit for bit, whatever is drawn with
it. On a CUDA device one kernel draws normal numbers, where it can run (``device``).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from proofserve.protocol.device import choice
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.murmur import as_float32, hash_scrambled, scramble, seed_bits

# Numbers per tile. On a CPU a tile and its temporaries (1 MiB each) stay in the cache, yet are long
# enough to hide the cost of a call; elsewhere large kernels count and a tile only bounds memory.
_CPU_TILE = 2**18
_DEVICE_TILE = 2**24

_PER_HASH = 2.0**-32
_TWO_PI = 6.2831854820251465  # float32(2*pi), bits 0x40c90fdb
_SMALLEST_U1 = 1e-10


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
    if kernels := choice.kernels_for(out.device):
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
