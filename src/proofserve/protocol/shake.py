"""Bytes and signs from SHAKE-256, for our own schemes (``docs/native.md``, section 1)."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray


def stream(version: bytes, fields: Sequence[bytes], length: int) -> bytes:
    """``length`` bytes of SHAKE-256 of the seed that ``fields`` give under a scheme's ``version``.

    The seed is SHA-256 of the version and of each field behind its length as u32 LE.
    """
    return next(streams(version, fields[:-1], fields[-1:], length))


def streams(
    version: bytes, shared: Sequence[bytes], last: Iterable[bytes], length: int
) -> Iterator[bytes]:
    """``stream`` of seeds with ``shared`` fields and one of ``last``; the former hashed once."""
    begun = hashlib.sha256(version + b"".join(map(_packed, shared)))
    for field in last:
        whole = begun.copy()
        whole.update(_packed(field))
        yield hashlib.shake_256(whole.digest()).digest(length)


def _packed(field: bytes) -> bytes:
    return len(field).to_bytes(4, "little") + field


def signs(drawn: NDArray[np.uint8], count: int) -> NDArray[np.float32]:
    """+1 for a bit of 1 and -1 for 0, the least significant bit of each byte first.

    ``drawn`` [..., bytes] gives float32 [..., count].
    """
    bits = np.unpackbits(drawn, axis=-1, count=count, bitorder="little")
    return bits.astype(np.float32) * 2 - 1


def u64(number: int) -> bytes:
    # The nonces that fill up a forward are negative.
    return (number % 2**64).to_bytes(8, "little")
