"""What proofs choose of a model: the tokens of prompts, and in ``sketch-v2`` the experts."""

import math
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


# Numbers that a position of a layer draws: where its experts begin and their step, and the same of
# its groups.
DRAWS = 4


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer in which ``chosen`` of its ``experts`` compute each token.

    Where the router may only choose within ``chosen_groups`` of ``groups``, which are equally
    large and follow each other, so does the block. Raises ProtocolError if no choice is possible.
    """

    experts: int
    chosen: int
    groups: int = 1
    chosen_groups: int = 1

    def __post_init__(self) -> None:
        fits = 1 <= self.chosen_groups <= self.groups and self.experts % self.groups == 0
        if not (fits and 1 <= self.chosen <= self.allowed):
            raise ProtocolError("scheme", f"sketch-v2 cannot choose experts of {self}")

    @property
    def group_size(self) -> int:
        return self.experts // self.groups

    @property
    def allowed(self) -> int:
        """How many experts the chosen groups hold."""
        return self.chosen_groups * self.group_size

    def experts_of(self, drawn: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Different ids [positions, chosen], each expert equally often; ``drawn`` is
        [positions, DRAWS]."""
        first, step, first_group, group_step = (drawn[:, each] for each in range(DRAWS))
        groups = _every(first_group, group_step, self.groups, self.chosen_groups)
        places = _every(first, step, self.allowed, self.chosen)
        group = np.take_along_axis(groups, places // self.group_size, axis=1)
        ids: NDArray[np.int64] = group * self.group_size + places % self.group_size
        return ids


def _every(
    first: NDArray[np.uint64], step: NDArray[np.uint64], modulus: int, count: int
) -> NDArray[np.int64]:
    """(a + j b) mod ``modulus`` for j below ``count``: [positions, count].

    b is one of the numbers prime to the modulus, so that no result repeats.
    """
    primes = np.array([b for b in range(1, max(2, modulus)) if math.gcd(b, modulus) == 1])
    a = (first % np.uint64(modulus)).astype(np.int64)
    b = primes[(step % np.uint64(len(primes))).astype(np.int64)]
    every: NDArray[np.int64] = (a[:, None] + np.arange(count) * b[:, None]) % modulus
    return every
