"""Experts that the block chooses in place of the model's router: ``sketch-v2``."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.errors import ProtocolError

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
