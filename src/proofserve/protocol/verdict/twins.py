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
# How much more alike wrong weights make twins, and the standard deviation of a nonce. On the
# package's trained model int8 rounded at random leans by 0.66, int8 in groups of 32 by 0.44; on one
# trained for less time it was 0.29 and 0.10. Another honest kernel leans by 0.01 +- 0.17.
_LEAN, _SPREAD = 0.25, 0.2
_BETS = np.array([0.5, 1.0, 2.0, 4.0])

Vector = NDArray[np.float32]


def twin_log_factors(alike: NDArray[np.float64], own: NDArray[np.float64]) -> NDArray[np.float64]:
    """What nonces give to every bet, from ``alikeness`` of their errors [n] and of our own [n].

    float64 [n, bets].
    """
    return symmetric_log_factors((alike - own - MARGIN)[:, np.newaxis], _BETS)


def twin_log_clearing(alike: NDArray[np.float64], own: NDArray[np.float64]) -> NDArray[np.float64]:
    """What nonces give to the ratio of an honest node over wrong weights: float64 [n]."""
    clearing: NDArray[np.float64] = _LEAN * (_LEAN / 2 - (alike - own)) / _SPREAD**2
    return clearing


class TwinEvidence:
    """Evidence from sketches of both twins, each float32 [2 * k_dim].

    ``log_clearing`` is the logarithm of how much likelier the nonces are from an honest node than
    from one with wrong weights.
    """

    def __init__(self) -> None:
        self._evidence = Evidence(len(_BETS))
        self.log_clearing = 0.0

    def add(self, error: Vector, own_error: Vector) -> None:
        """``own_error`` is of the validator's run in the served dtype, for the same nonce."""
        alike, own = np.array([alikeness(error)]), np.array([alikeness(own_error)])
        self._evidence.add(twin_log_factors(alike, own)[0])
        self.log_clearing += float(twin_log_clearing(alike, own)[0])

    @property
    def log(self) -> float:
        return self._evidence.log


def alikeness(error: Vector) -> float:
    """The cosine of the two twins' errors."""
    first, second = np.split(error, TWINS)
    return cosine(first, second)
