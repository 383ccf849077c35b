"""Roots of hash trees over published vectors, and the paths that open them (RFC 6962, section 2.1).

A node that publishes only the root of a batch can no longer choose its vectors: any of them is
asked for later, and its path leads to the root or the node is a fraud.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

_LEAF, _INNER = b"\x00", b"\x01"


@dataclass(frozen=True, slots=True)
class CommittedBatch:
    """The root over ``count`` nonces of a lane, in its order, from lane index ``first_index`` on.

    ``previous_root`` is that of the batch before it in the round, None for the round's first.
    """

    first_index: int
    count: int
    root: bytes
    previous_root: bytes | None


@dataclass(frozen=True, slots=True)
class Opening:
    """The vector of a nonce, its index in the lane, and its path to the root of its batch.

    ``vector_b64`` is empty for a nonce that the node could not compute.
    """

    nonce: int
    vector_b64: str
    index: int
    batch: CommittedBatch
    path: tuple[bytes, ...]


def leaf(nonce: int, vector: bytes) -> bytes:
    """SHA-256(0x00 + nonce as u64 LE + ``vector``, the float16 of the wire): 32 bytes.

    The vector of a nonce that could not be computed has no bytes.
    """
    return hashlib.sha256(_LEAF + nonce.to_bytes(8, "little") + vector).digest()


def root(leaves: Sequence[bytes]) -> bytes:
    """The root of one leaf or more, in the order of the round's nonces: 32 bytes."""
    return _levels(leaves)[-1][0]


def paths(leaves: Sequence[bytes], indices: Sequence[int]) -> list[tuple[bytes, ...]]:
    """For each of ``indices`` the hashes beside its way to the root, from the leaf upwards."""
    levels = _levels(leaves)
    return [_path(levels, index) for index in indices]


def opens(
    root_hash: bytes, count: int, index: int, leaf_hash: bytes, path: Sequence[bytes]
) -> bool:
    """Whether ``leaf_hash`` is leaf ``index`` of the ``count`` under ``root_hash``."""
    if not 0 <= index < count:
        return False
    last, found, used = count - 1, leaf_hash, 0
    while last > 0:
        # A level's last node without a neighbour moves up as it is.
        if index % 2 or index < last:
            if used == len(path):
                return False
            beside = path[used]
            used += 1
            found = _inner(beside, found) if index % 2 else _inner(found, beside)
        index, last = index // 2, last // 2
    return used == len(path) and found == root_hash


def _levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """All levels of the tree, from the leaves to the root alone.

    Pairing neighbours gives the tree of the RFC, which splits at the largest power of two: every
    left part is full, and an odd last node is the root of a smaller right part.
    """
    if not leaves:
        raise ValueError("a root needs at least one leaf")
    levels = [list(leaves)]
    while len(level := levels[-1]) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        levels.append([_inner(a, b) for a, b in pairs] + level[len(level) // 2 * 2 :])
    return levels


def _path(levels: Sequence[Sequence[bytes]], index: int) -> tuple[bytes, ...]:
    beside = []
    for level in levels[:-1]:
        if index ^ 1 < len(level):
            beside.append(level[index ^ 1])
        index //= 2
    return tuple(beside)


def _inner(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_INNER + left + right).digest()
