"""From seed strings to 32-bit seeds."""

import hashlib
import struct


def seed(string: str) -> int:
    """The ordinary seed of a string: the first word of its digest (protocol 0.1)."""
    return words(string)[0]


def words(string: str) -> tuple[int, ...]:
    """All eight big-endian uint32 words of the SHA-256 digest of a string (protocol 0.9)."""
    return struct.unpack(">8I", hashlib.sha256(string.encode()).digest())
