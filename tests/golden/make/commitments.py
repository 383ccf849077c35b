"""Roots and paths of RFC 6962 over the leaves of ``docs/native.md``, written as recursions."""

import hashlib


def leaf(nonce: int, vector: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + nonce.to_bytes(8, "little") + vector).digest()


def root(leaves: list[bytes]) -> bytes:
    if len(leaves) == 1:
        return leaves[0]
    split = _split(len(leaves))
    return hashlib.sha256(b"\x01" + root(leaves[:split]) + root(leaves[split:])).digest()


def path(index: int, leaves: list[bytes]) -> list[bytes]:
    """The hashes beside the way from leaf ``index`` to the root, from the leaf upwards."""
    if len(leaves) == 1:
        return []
    split = _split(len(leaves))
    if index < split:
        return [*path(index, leaves[:split]), root(leaves[split:])]
    return [*path(index - split, leaves[split:]), root(leaves[:split])]


def _split(count: int) -> int:
    """The largest power of two below ``count``."""
    return 1 << (count - 1).bit_length() - 1
