"""Evidence that grows with every nonce and may be looked at after each of them.

An e-process is a number E that starts at 1 and, for an honest node, stays below 1/alpha for ever
with a chance of at least 1 - alpha (J. Ville, 1939). So a validator may stop whenever it knows
enough. Here E is a mean of products, one for each bet: a guess of how a fraud would look. The mean
of e-processes is one, whichever bet comes true.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

# A node may compute some nonces honestly: the shares that it forges.
SHARES: Final = (1.0, 0.4, 0.1)

Floats = NDArray[np.float64]


def log_path(log_factors: Floats) -> Floats:
    """The logarithm of E at first and after each nonce [n + 1], by the factors [n, bets]."""
    sums = np.cumsum(log_factors, axis=0)
    highest = sums.max(axis=1, initial=-np.inf)
    logs = highest + np.log(np.exp(sums - highest[:, np.newaxis]).mean(axis=1))
    return np.concatenate([np.zeros(1), logs])


class RenewedEvidence:
    """Evidence against a node that may begin to cheat at any time, after however many answers.

    A mean of e-processes that begin after every ``EVERY`` answers, each with ``bets`` products: the
    k-th, counted from 0, has a weight of 1/((k + 1)(k + 2)), and is 1 before it begins.
    """

    EVERY: Final = 32

    def __init__(self, bets: int) -> None:
        self._logs = np.zeros(bets)
        self._began = [self._logs]
        self._answers = 0

    def add(self, log_factors: NDArray[np.float64]) -> None:
        """Multiply every product [bets] by its factor for one more answer."""
        self._logs = self._logs + log_factors
        self._answers += 1
        if self._answers % self.EVERY == 0:
            self._began.append(self._logs)

    @property
    def log(self) -> float:
        """The natural logarithm of the mean."""
        k = np.arange(len(self._began))[:, np.newaxis]
        logs = self._logs - np.array(self._began) - np.log((k + 1) * (k + 2) * len(self._logs))
        return float(np.logaddexp(np.logaddexp.reduce(logs, axis=None), -math.log(len(k) + 1)))


def rare_factors(happened: NDArray[np.bool_], rate: float, shares: Sequence[float]) -> Floats:
    """Log factors of cases [n] for something that happens in more than a share ``rate`` of all.

    Each bet is on one of ``shares`` instead, all of them below 1: [n, shares].
    """
    others = np.array(shares)
    without = np.log1p(-others)
    return np.where(happened[:, np.newaxis], np.log1p(-others + others / rate), without)


def mixed(log_ratios: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """log of 1 - share + share * ratio: what a node gives that forges this share of its nonces."""
    if share == 1.0:
        return log_ratios
    made: NDArray[np.float64] = np.logaddexp(math.log1p(-share), math.log(share) + log_ratios)
    return made
