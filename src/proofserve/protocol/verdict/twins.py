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


class TwinEvidence:
    """Evidence from sketches of both twins, each float32 [2 * k_dim]."""

    def __init__(self) -> None:
        self._evidence = Evidence(len(_BETS))

    def add(self, error: Vector, own_error: Vector) -> None:
        """``own_error`` is of the validator's run in the served dtype, for the same nonce."""
        x = _alike(error) - _alike(own_error) - MARGIN
        self._evidence.add(symmetric_log_factors(x, _BETS))

    @property
    def log(self) -> float:
        return self._evidence.log


def _alike(error: Vector) -> float:
    first, second = np.split(error, TWINS)
    return cosine(first, second)
