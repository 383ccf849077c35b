"""From distances to a target radius: quantile, interval, and how far blocks differ."""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.calibrate.distances import Distances
from proofserve.protocol.distance import OUTPUT_DIM
from proofserve.protocol.verdict.counting import binomial_tail

# Two independent directions in n dimensions have a cosine c of mean 0 and variance 1/n, and are
# sqrt(2 - 2c) apart, which is sqrt(2) * (1 - c/2) to first order.
THEORY_MEAN: Final = math.sqrt(2.0)
THEORY_SD: Final = 1.0 / math.sqrt(2.0 * OUTPUT_DIM)

CONFIDENCE: Final = 0.95
_DRAWS = 200_000
_SEED = 0


@dataclass(frozen=True, slots=True)
class Calibration:
    """The ``r_target`` of one method: the radius that the wanted share of distances is below.

    ``interval`` is the 95 % confidence interval of the radius, for these blocks. ``rates`` are
    shares (0 to 1) of nonces below ``r_target``, float64 [blocks, keys].
    """

    distances: Distances
    r_target: float
    interval: tuple[float, float]
    rates: NDArray[np.float64]

    @property
    def mean(self) -> float:
        return float(self.distances.mean())

    @property
    def sd(self) -> float:
        return float(self.distances.std())

    @property
    def block_rates(self) -> list[float]:
        """Share of winners of each block; every key has as many nonces."""
        return [float(rate) for rate in self.rates.mean(axis=1)]

    @property
    def spread(self) -> float:
        """Between the blocks with the most and the fewest winners, in percentage points."""
        return 100.0 * (max(self.block_rates) - min(self.block_rates))


def calibrate(distances: Distances, rate: float) -> Calibration:
    """The radius that a share of ``rate`` (0 to 1) of ``distances`` lies below.

    Raises ValueError for too few distances.
    """
    r_target = float(np.quantile(distances, rate))
    # A nonce wins strictly below the target (protocol A.2).
    rates = (distances < r_target).mean(axis=2)
    return Calibration(distances, r_target, quantile_interval(distances, rate), rates)


def quantile_interval(values: Distances, share: float) -> tuple[float, float]:
    """Two of ``values`` with the true quantile of ``share`` between them, 19 times in 20.

    Holds for any distribution from which the values were drawn independently. Raises ValueError
    for too few values.
    """
    low, high = interval_ranks(values.size, share)
    ordered = np.sort(values, axis=None)
    return float(ordered[low - 1]), float(ordered[high - 1])


def interval_ranks(count: int, share: float) -> tuple[int, int]:
    """Ranks (1 to ``count``) of the values that hold the quantile of ``share`` between them.

    The number X of values below the quantile is Binomial(count, share), and the quantile lies
    between the values of rank l and u iff l <= X < u. The ranks are the innermost with at most
    2.5 % beyond either of them (David and Nagaraja, Order Statistics, 7.1).

    Raises ValueError if so few values cannot hold it with that confidence.
    """
    beyond = (1.0 - CONFIDENCE) / 2.0

    def falling(k: int) -> float:
        return -binomial_tail(k, count, share)

    ranks = range(count + 1)
    low = bisect_right(ranks, -(1.0 - beyond), key=falling) - 1
    high = bisect_left(ranks, -beyond, key=falling)
    if low < 1 or high > count:
        raise ValueError(
            f"{count} nonces are too few for a rate of {share:g}; "
            "compute more of them, or ask for a rate closer to 0.5"
        )
    return low, high


def sampling_spread(blocks: int, count: int, rate: float) -> float:
    """The spread that ``blocks`` of ``count`` nonces and one true ``rate`` exceed 1 time in 20.

    In percentage points: the 95 % point of the range of as many independent Binomial(count, rate)
    shares, by simulation. The third digit is uncertain, and the same in every call.
    """
    drawn = np.random.default_rng(_SEED).binomial(count, rate, size=(_DRAWS, blocks))
    return 100.0 * float(np.quantile(np.ptp(drawn, axis=1), CONFIDENCE)) / count
