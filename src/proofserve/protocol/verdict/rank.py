"""The rank test: a distance's place among honest ones, without any assumption on their shape.

If a node is honest, its distances and those of the calibration are exchangeable, so the rank of
each new one among all before it is uniform and independent (V. Vovk et al., Algorithmic Learning in
a Random World, 2005, section 2.2). The bets are on small ranks from above.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.evidence import Evidence
from proofserve.protocol.verdict.scale import ALLOWANCE

# With fewer honest distances no rank is small enough to say much.
LEAST_PAIRS = 200
# The bet on p is power * p^(power - 1), whose mean over uniform p is 1; small powers bet on the
# largest distances alone.
_POWERS = np.array([0.05, 0.1, 0.3, 0.6])


def rank_log_factors(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """What each rank ``p`` [n], in (0, 1], gives to every bet: float64 [n, bets]."""
    factors: NDArray[np.float64] = np.log(_POWERS) + (_POWERS - 1) * np.log(p)[:, np.newaxis]
    return factors


class RankEvidence:
    """Evidence that a prover's distances are larger than the ``honest`` ones of a calibration.

    Raises ProtocolError for fewer than 200 of them.
    """

    def __init__(self, honest: Sequence[float]) -> None:
        if len(honest) < LEAST_PAIRS:
            raise ProtocolError("pairs", f"{len(honest)} are too few, {LEAST_PAIRS} are needed")
        self._seen = sorted(honest)
        self._evidence = Evidence(len(_POWERS))

    def add(self, distance: float) -> None:
        """One more nonce; a missing or malformed claim is infinitely far."""
        allowed = distance / ALLOWANCE
        above = len(self._seen) - bisect_left(self._seen, allowed)
        # Ties count as above: that makes p larger, never smaller.
        p = (above + 1) / (len(self._seen) + 1)
        insort(self._seen, allowed)
        self._evidence.add(rank_log_factors(np.array([p]))[0])

    @property
    def log(self) -> float:
        return self._evidence.log
