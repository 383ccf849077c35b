"""The token test: whether the tokens of an answer were drawn from the model's distribution.

Sketches show that the model read an answer. A cheap model may have written it, and the real one
read it once. With p the real model's distribution of a token x, p(x)^-lam over the sum of
p(y)^(1 - lam) has a mean of 1 if x was drawn from p, whatever came before: the product over an
answer is a martingale (``docs/receipts.md``).
"""

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.evidence import Evidence

# Above 0 a bet on tokens that are too unlikely, below 0 on tokens that are too likely. The small
# ones find a writer that is nearly as good as the model.
TILTS = (-0.4, -0.2, -0.1, -0.05, 0.05, 0.1, 0.2, 0.4)
# What rounding in the server may add to the logarithm of a factor, for each unit of tilt.
_ROUNDING = 0.02
# The shares of a greedy answer's tokens that a cheap writer may choose otherwise.
_OTHER_SHARES = (0.5, 0.1, 0.02)

Floats = NDArray[np.float64]


def token_log_factors(log_p: Floats, tokens: NDArray[np.int64]) -> Floats:
    """What each token gives to every bet: float64 [n, len(TILTS)].

    ``log_p`` [n, vocabulary] are the logarithms of p, minus infinity where the sampling excludes
    a token, ``tokens`` [n] those of the answer. An excluded token gives 0: ``TokenEvidence`` is
    for tokens that can have been drawn.
    """
    chosen = log_p[np.arange(len(tokens)), tokens]
    excluded = np.isneginf(chosen)
    factors = np.empty((len(tokens), len(TILTS)))
    for column, tilt in enumerate(TILTS):
        room = _ROUNDING * abs(tilt)
        factors[:, column] = -tilt * chosen - _log_sum((1.0 - tilt) * log_p) - room
    factors[excluded] = 0.0
    return factors


def greedy_gap(logits: Floats, tokens: NDArray[np.int64]) -> Floats:
    """How far each token's logit is below the largest: float64 [n], 0 for the greedy choice."""
    gaps: Floats = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
    return gaps


class TokenEvidence:
    """Evidence that the tokens of one answer after the other were not drawn from p."""

    def __init__(self) -> None:
        self._evidence = Evidence(len(TILTS))

    def add(self, log_p: Floats, tokens: NDArray[np.int64]) -> None:
        """One answer, or a part of one; shapes as of ``token_log_factors``."""
        self._evidence.add(token_log_factors(log_p, tokens).sum(axis=0))

    @property
    def log(self) -> float:
        return self._evidence.log


class GreedyEvidence:
    """Evidence that tokens of greedy answers are not the largest logit's.

    A gap is beyond the limit in a share of at most ``rate`` of an honest server's tokens.
    """

    def __init__(self, rate: float) -> None:
        shares = np.array(_OTHER_SHARES)
        self._within = np.log1p(-shares)
        self._beyond = np.log1p(-shares + shares / rate)
        self._evidence = Evidence(len(shares))

    def add(self, beyond: NDArray[np.bool_]) -> None:
        """Whether the gap of each token is beyond the limit, bool [n]."""
        count = int(np.count_nonzero(beyond))
        self._evidence.add(count * self._beyond + (len(beyond) - count) * self._within)

    @property
    def log(self) -> float:
        return self._evidence.log


def _log_sum(logs: Floats) -> Floats:
    """log of the sum of exp(``logs``) along the last axis; minus infinity counts as nothing."""
    highest = logs.max(axis=1)
    found: Floats = highest + np.log(np.exp(logs - highest[:, np.newaxis]).sum(axis=1))
    return found
