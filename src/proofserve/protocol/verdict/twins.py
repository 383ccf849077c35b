"""The twins test: wrong weights move both prompts of a nonce the same way, whatever the weights.

It needs no suspect, and so convicts private and random ways of rounding. Rounding of activations
moves twins together as well, but less, and by as much in the validator's own run in the served
dtype (``docs/native.md``).
"""

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.sketch import TWINS
from proofserve.protocol.verdict.direction import cosine
from proofserve.protocol.verdict.evidence import Evidence, symmetric_log_factors

# From one honest kernel to the next, the mean cosine of twins differs by up to this.
MARGIN = 0.03
_BETS = np.array([0.5, 1.0, 2.0, 4.0])

Vector = NDArray[np.float32]


def twin_log_factors(alike: NDArray[np.float64], own: NDArray[np.float64]) -> NDArray[np.float64]:
    """What nonces give to every bet, from ``alikeness`` of their errors [n] and of our own [n].

    float64 [n, bets].
    """
    return symmetric_log_factors((alike - own - MARGIN)[:, np.newaxis], _BETS)


class TwinEvidence:
    """Evidence from sketches of both twins, each float32 [2 * k_dim]."""

    def __init__(self) -> None:
        self._evidence = Evidence(len(_BETS))

    def add(self, error: Vector, own_error: Vector) -> None:
        """``own_error`` is of the validator's run in the served dtype, for the same nonce."""
        alike, own = np.array([alikeness(error)]), np.array([alikeness(own_error)])
        self._evidence.add(twin_log_factors(alike, own)[0])

    @property
    def log(self) -> float:
        return self._evidence.log


def alikeness(error: Vector) -> float:
    """The cosine of the two twins' errors."""
    first, second = np.split(error, TWINS)
    return cosine(first, second)
