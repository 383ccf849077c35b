"""The integer hash behind every random number (protocol 0.3), batched over seeds and keys.

Torch supports few operations on unsigned integers, so a uint32 is held as the int32 with the same
bits: products and sums wrap in the same way, and a right shift is made logical by masking the
copies of the sign bit. No value is wider than four bytes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from proofserve.protocol.device import choice
from proofserve.protocol.device.copies import to_device


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


_KEY_FACTORS = _signed(0xCC9E2D51), _signed(0x1B873593)
_STEP = _signed(0xE6546B64)
_FINAL_FACTORS = _signed(0x85EBCA6B), _signed(0xC2B2AE35)
_SIGN_BIT = _signed(0x80000000)


def seed_bits(seeds: Sequence[int], device: torch.device) -> Tensor:
    """Seeds 0..2^32-1 as int32 bit patterns [b] on ``device``."""
    return to_device(torch.from_numpy(np.array(seeds, dtype=np.uint32).view(np.int32)), device)


def hash_keys(seeds: Tensor, keys: Tensor) -> Tensor:
    """H(seed, key) for every pair (protocol 0.3).

    ``seeds`` [b] and ``keys`` [n] are int32 bit patterns on one device; the result [b, n] holds
    the int32 bit pattern of each uint32 hash.
    """
    if kernels := choice.kernels_for(seeds.device):
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
