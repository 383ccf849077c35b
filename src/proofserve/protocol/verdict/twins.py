"""The twins test: wrong weights move both prompts of a nonce the same way, whatever the weights.

It needs no suspect, and so notices private and random ways of rounding. Rounding of activations
moves twins together as well, by an amount that differs from one honest kernel to the next
(``docs/native.md``): so the test compares with calibrated kernels, and refutes them without
convicting by itself.
"""

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.sketch import TWINS
from proofserve.protocol.verdict.leaning import cosine

# How much more alike wrong weights make twins, and the standard deviation of a nonce. On the
# package's trained model int8 rounded at random leans by 0.66, int8 in groups of 32 by 0.44; on one
# trained for less time it was 0.29 and 0.10.
_LEAN, _SPREAD = 0.25, 0.2

Vector = NDArray[np.float32]


def twin_log_clearing(figures: NDArray[np.float64], honest: float) -> NDArray[np.float64]:
    """What nonces give to the ratio of an honest node over wrong weights: float64 [n].

    ``figures`` [n] are alikeness less our own, and ``honest`` is their mean for honest kernels.
    """
    clearing: NDArray[np.float64] = _LEAN * (_LEAN / 2 - (figures - honest)) / _SPREAD**2
    return clearing


def alikeness(error: Vector) -> float:
    """The cosine of the two twins' errors."""
    first, second = np.split(error, TWINS)
    return cosine(first, second)
