"""How far two honest engines are apart, and the threshold that their distances give."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.calibrate.target import CONFIDENCE, quantile_interval
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.vectors import vectors_of
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.counting import rate_interval

# The chance of a value beyond one end of an interval.
_TAIL = (1.0 - CONFIDENCE) / 2.0


@dataclass(frozen=True, slots=True)
class Pairs:
    """The vectors of two engines for the same nonces: float32 [n, k_dim], as the wire has them."""

    one: NDArray[np.float32]
    other: NDArray[np.float32]

    @property
    def distances(self) -> NDArray[np.float64]:
        apart: NDArray[np.float32] = np.linalg.norm(self.one - self.other, axis=1)
        return apart.astype(np.float64)


def pairs_of(one: Sequence[Claim], other: Sequence[Claim], k_dim: int) -> Pairs:
    """Pair the vectors of the same nonce, in the order of ``one``.

    Raises LabError unless both have the same nonces, each once, and MalformedVector for a vector
    that is not k finite numbers, because a broken vector is no noise.
    """
    for claims in (one, other):
        if len({claim.nonce for claim in claims}) != len(claims):
            raise LabError("one engine has a nonce twice")
    ours, theirs = vectors_of(one, k_dim), vectors_of(other, k_dim)
    if alone := ours.keys() ^ theirs.keys():
        raise LabError(
            f"only one engine has {len(alone)} of the nonces, nonce {min(alone)} for instance"
        )
    if not ours:
        raise LabError("there is no artifact to compare")
    return Pairs(np.array(list(ours.values())), np.array([theirs[nonce] for nonce in ours]))


@dataclass(frozen=True, slots=True)
class Noise:
    """The quantile of ``distances`` (float64 [n]) beyond which a share ``rate`` of them lies.

    ``quantile`` is the best estimate, ``interval`` its 95 % confidence interval.
    """

    distances: NDArray[np.float64]
    rate: float
    quantile: float
    interval: tuple[float, float]

    @property
    def dist_threshold(self) -> float:
        """The upper end of the interval, rounded up. The chance that it is too low is 1 in 40."""
        return _rounded_up(self.interval[1], 3)

    @property
    def quantiles(self) -> dict[str, float]:
        """The distance at or below which a share of 0.5, 0.9, 0.99 and 1 of the sample lies."""
        return {f"{p:g}": float(np.quantile(self.distances, p)) for p in (0.5, 0.9, 0.99, 1.0)}

    @property
    def rate_interval(self) -> tuple[float, float]:
        """The 95 % interval of the share of honest nonces beyond ``dist_threshold``."""
        beyond = int((self.distances > self.dist_threshold).sum())
        return rate_interval(beyond, self.distances.size)


def noise(distances: NDArray[np.float64], rate: float) -> Noise:
    """The threshold that honest distances exceed at ``rate``, from a sample of them.

    Quantile and interval are values of the sample (``target.interval_ranks``), so that they hold
    for every distribution; nothing is extrapolated. Raises LabError for too few distances.
    """
    require_enough(distances.size, rate)
    quantile = float(np.quantile(distances, 1.0 - rate, method="inverted_cdf"))
    return Noise(distances, rate, quantile, quantile_interval(distances, 1.0 - rate))


def require_enough(count: int, rate: float) -> None:
    """Raise LabError, which says what is enough, if ``count`` distances are too few."""
    needed = distances_needed(rate)
    if count < needed:
        raise LabError(
            f"{count} nonces are too few for a rate of {rate:g}. It takes {needed}, or"
            f" --rate {_least_rate(count)}"
        )


def distances_needed(rate: float) -> int:
    """The fewest distances whose largest exceeds the 1 - ``rate`` quantile, 97.5 % confident.

    The chance that none of n exceeds it is (1 - rate)^n. Raises ValueError unless 0 < rate < 1.
    """
    if not 0.0 < rate < 1.0:
        raise ValueError(f"rate: {rate} is not between 0 and 1")
    return math.ceil(math.log(_TAIL) / math.log1p(-rate))


def _least_rate(count: int) -> str:
    return f"{_rounded_up(1.0 - _TAIL ** (1.0 / count), 2):g}"


def _rounded_up(value: float, digits: int) -> float:
    if value == 0.0:
        return 0.0
    places = digits - 1 - math.floor(math.log10(value))
    step = Decimal(1).scaleb(-places)
    return float(Decimal(value).quantize(step, ROUND_CEILING))
