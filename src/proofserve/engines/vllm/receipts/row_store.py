"""The rows of requests by position, in numpy: a worker keeps them until their request has ended."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from proofserve.engines.vllm.receipts.messages import Wanted

# The positions int64 [n] and the rows float16 [n, k_dim] of a request, from several steps.
Part = tuple[NDArray[np.int64], NDArray[np.float16]]


class RowStore:
    """``size`` is the number of rows that are kept."""

    def __init__(self, k_dim: int) -> None:
        self._k_dim = k_dim
        self._parts: dict[str, list[Part]] = {}
        self.size = 0

    def add(
        self, ids: Sequence[str], positions: NDArray[np.int64], rows: NDArray[np.float16]
    ) -> None:
        """Keep row ``i``, of request ``ids[i]`` at ``positions[i]``. Later rows replace earlier."""
        numbers: dict[str, int] = {}
        owners = np.array([numbers.setdefault(name, len(numbers)) for name in ids])
        order = np.argsort(owners, kind="stable")
        ends = np.cumsum(np.bincount(owners, minlength=len(numbers)))
        for name, places in zip(numbers, np.split(order, ends[:-1]), strict=True):
            self._parts.setdefault(name, []).append((positions[places], rows[places]))
        self.size += len(ids)

    def forget(self, ids: Collection[str]) -> None:
        for name in ids:
            for positions, _rows in self._parts.pop(name, ()):
                self.size -= len(positions)

    def keep_only(self, ids: Collection[str]) -> None:
        known = set(ids)
        self.forget([name for name in self._parts if name not in known])

    def read(self, wanted: Wanted) -> bytes | None:
        """The rows as float16 LE [count, k_dim]; None if one is missing."""
        parts = self._parts.get(wanted.request_id, [])
        made = np.zeros((wanted.count, self._k_dim), "<f2")
        found = np.zeros(wanted.count, bool)
        for positions, rows in parts:
            places = positions - wanted.first
            inside = (places >= 0) & (places < wanted.count)
            # numpy assigns in order, so of two rows at a position the last one stays.
            made[places[inside]] = rows[inside]
            found[places[inside]] = True
        return made.tobytes() if found.all() else None
