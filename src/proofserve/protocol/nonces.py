"""The nonces that a node tries, and the valid range of nonces (protocol B.2, B.3, P.2.6)."""

import hashlib
import heapq
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.errors import ProtocolError

MAX_NONCE = 2**63 - 1


@dataclass(frozen=True)
class NonceLane:
    """The nonces of one worker: every ``n_groups * node_count``-th from its own start (B.3).

    The lanes of all (node, group) pairs are disjoint and together hold every nonce. Raises
    ProtocolError for a number outside its range.
    """

    node_id: int
    node_count: int
    group_id: int = 0
    n_groups: int = 1

    def __post_init__(self) -> None:
        for field, count_field in (("node_id", "node_count"), ("group_id", "n_groups")):
            index, count = getattr(self, field), getattr(self, count_field)
            if count < 1:
                raise ProtocolError(count_field, f"{count} is below 1")
            if not 0 <= index < count:
                raise ProtocolError(field, f"{index} is outside 0..{count - 1}")

    def is_part_of(self, lane: "NonceLane") -> bool:
        """Whether this lane is ``lane``, or one of those into which a group of it is divided."""
        node = (self.node_id, self.node_count) == (lane.node_id, lane.node_count)
        group, rest = self.group_id % lane.n_groups, self.n_groups % lane.n_groups
        return node and group == lane.group_id and not rest

    def nonce(self, x: int) -> int:
        return self.batch(x, 1)[0]

    def batch(self, start: int, size: int) -> tuple[int, ...]:
        """Nonces number ``start`` .. ``start + size - 1`` of the lane.

        Raises ProtocolError when ``start`` or ``size`` is negative or a nonce would exceed 2^63-1.
        """
        for field, value in (("start", start), ("size", size)):
            if value < 0:
                raise ProtocolError(field, f"{value} is negative")
        stride = self._stride
        first = self._first + start * stride
        batch = range(first, first + size * stride, stride)
        if size and batch[-1] > MAX_NONCE:
            raise ProtocolError("start", f"the lane ends before number {start + size - 1}")
        return tuple(batch)

    def index_of(self, nonce: int) -> int | None:
        """The number of ``nonce`` in the lane; None for a nonce of another lane."""
        index, rest = divmod(nonce - self._first, self._stride)
        return index if index >= 0 and not rest else None

    def indices_of(self, nonces: NDArray[np.int64]) -> NDArray[np.int64]:
        """``index_of`` of many nonces, int64 [n], at once; -1 for a nonce of another lane."""
        if self._first > MAX_NONCE:
            return np.full(nonces.shape, -1, np.int64)
        if self._stride > MAX_NONCE:
            return np.where(nonces == self._first, 0, -1)
        # A negative nonce is no nonce, and the difference would overflow.
        offsets = np.maximum(nonces, -1) - self._first
        indices, rest = np.divmod(offsets, self._stride)
        return np.where((offsets >= 0) & (rest == 0), indices, -1)

    @property
    def _first(self) -> int:
        return self.node_id + self.group_id * self.node_count

    @property
    def _stride(self) -> int:
        return self.n_groups * self.node_count


def check_nonces(field: str, nonces: Sequence[int]) -> None:
    """Raise ProtocolError for ``field`` unless all nonces are within 0..2^63-1 and distinct."""
    seen: set[int] = set()
    for nonce in nonces:
        if not 0 <= nonce <= MAX_NONCE:
            raise ProtocolError(field, f"{nonce} is outside 0..{MAX_NONCE}")
        if nonce in seen:
            raise ProtocolError(field, f"{nonce} occurs twice")
        seen.add(nonce)


def draw(nonces: Iterable[int], seed: str, most: int | None = None) -> tuple[int, ...]:
    """The first ``most`` of ``nonces``, in an order that ``seed`` decides.

    The order is that of the SHA-256 of "{seed}|{nonce}", so that all who know the seed draw the
    same. The prover must not know it before it publishes the artifacts, or their roots.
    """

    def rank(nonce: int) -> bytes:
        return hashlib.sha256(f"{seed}|{nonce}".encode()).digest()

    return tuple(sorted(nonces, key=rank) if most is None else heapq.nsmallest(most, nonces, rank))


def fresh_seed() -> str:
    """A seed for ``draw`` that did not exist before this call, and that cannot be guessed.

    Called after the artifacts or their roots are published, it leaves a prover no nonce of which it
    knows that it will not be asked.
    """
    return secrets.token_hex(16)


def pad(nonces: Sequence[int], size: int) -> tuple[int, ...]:
    """Fill up to ``size`` with padding nonces -1, -2, ... (B.2); ``size`` or more stay as they are.

    Raises ProtocolError for nonces that ``check_nonces`` refuses: no nonce is negative.
    """
    check_nonces("nonces", nonces)
    return (*nonces, *range(-1, len(nonces) - size - 1, -1))
