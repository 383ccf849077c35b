"""The token ids that prompts of proofs may hold."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.errors import ProtocolError

# A twin differs from its prompt in one token, so there must be another one to choose.
_LEAST = 2


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Token ids in rising order, as ranges [first, end) that neither touch nor overlap.

    Nearly all of a vocabulary is one range, which is short enough to travel with every call.
    Raises ProtocolError for less than two ids.
    """

    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if len(self) < _LEAST:
            raise ProtocolError("tokenizer", f"{len(self)} ordinary token ids where 2 are needed")

    def __len__(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def ids(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids at these places (0 to len - 1) of the rising order: int64 of the same shape."""
        firsts = np.array([first for first, _ in self.ranges])
        # The place at which each range begins.
        begins = np.cumsum([0, *(end - first for first, end in self.ranges)])[:-1]
        which = np.searchsorted(begins, places, side="right") - 1
        ids: NDArray[np.int64] = firsts[which] + places - begins[which]
        return ids


def allowed_tokens(ids: Collection[int]) -> AllowedTokens:
    """The ids of a tokenizer's vocabulary less its special and added ones, as ranges."""
    ordered = np.array(sorted(set(ids)), dtype=np.int64)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    runs = [run for run in np.split(ordered, breaks) if len(run)]
    return AllowedTokens(tuple((int(run[0]), int(run[-1]) + 1) for run in runs))
