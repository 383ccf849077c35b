"""The direction test: whether an error points to where suspected weights would move the result.

Rounded weights move every result in a direction that the validator can compute. Rounding in honest
kernels has no reason to point there, so for an honest node the cosine of the two is as often
negative as positive. The test needs no threshold, and names the weights (``docs/native.md``).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.evidence import Evidence, symmetric_log_factors

# Honest kernels may lean a little. The largest mean cosines seen, over 192 nonces, are 0.02 with
# sketch-v1 and 0.09 with the 12 values of artifact-v1, whose standard error is 0.03.
CERTIFIED_MARGIN = 0.1
# A calibration measures the leaning; this is the least margin that it gives.
CALIBRATED_MARGIN = 0.05
_CERTIFIED_BETS = np.array([0.5, 1.0, 2.0, 4.0])
# How often a bound of the honest spread may be wrong, and the normal quantile of that.
_WRONG, _Z = 0.01, 2.33
# In standard deviations of an honest cosine.
_CALIBRATED_BETS = np.array([0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0])
# Of one nonce: rare honest errors need not be normal, and must not convict alone.
_LOG_CAP = math.log(1000.0)

Vector = NDArray[np.float32]


def cosine(error: Vector, prediction: Vector) -> float:
    """The cosine of two vectors; 0 if one of them is zero, because it has no direction."""
    lengths = float(np.linalg.norm(error)) * float(np.linalg.norm(prediction))
    return float(np.dot(error, prediction)) / lengths if lengths > 0.0 else 0.0


def certified_log_factors(cosines: NDArray[np.float64]) -> NDArray[np.float64]:
    """What each of ``cosines`` [n] gives to every bet of ``CertifiedDirection``: [n, bets]."""
    return symmetric_log_factors(cosines[:, np.newaxis] - CERTIFIED_MARGIN, _CERTIFIED_BETS)


class CertifiedDirection:
    """Evidence for one suspect from the cosines of the nonces.

    It only needs that an honest cosine less ``CERTIFIED_MARGIN`` is not more often positive than
    negative.
    """

    def __init__(self) -> None:
        self._evidence = Evidence(len(_CERTIFIED_BETS))

    def add(self, c: float) -> None:
        self._evidence.add(certified_log_factors(np.array([c]))[0])

    @property
    def log(self) -> float:
        return self._evidence.log


@dataclass(frozen=True, slots=True)
class HonestSpread:
    """Bounds on the standard deviation and on the mean of honest cosines with one suspect."""

    sd: float
    margin: float = CALIBRATED_MARGIN


def honest_spread(cosines: NDArray[np.float64]) -> HonestSpread:
    """The bounds that the cosines [n] of honest nonces give, each wrong 1 time in 100.

    For normal cosines the sum of squares over the variance has a chi-square distribution with
    n - 1 degrees of freedom. Raises ProtocolError for fewer than 2.
    """
    if len(cosines) < 2:
        raise ProtocolError("cosines", f"{len(cosines)} are too few, 2 are needed")
    degrees = len(cosines) - 1
    sd = float(cosines.std(ddof=1))
    mean = float(cosines.mean()) + _Z * sd / math.sqrt(len(cosines))
    return HonestSpread(
        sd * math.sqrt(degrees / float(stats.chi2.ppf(_WRONG, degrees))),
        max(CALIBRATED_MARGIN, mean),
    )


def calibrated_log_factors(
    cosines: NDArray[np.float64], honest: HonestSpread
) -> NDArray[np.float64]:
    """What each of ``cosines`` [n] gives to every bet of ``CalibratedDirection``: [n, bets]."""
    bets = _CALIBRATED_BETS / honest.sd
    leaning = bets * (cosines[:, np.newaxis] - honest.margin)
    capped: NDArray[np.float64] = np.minimum(leaning - _log_mean(bets, honest.sd**-2), _LOG_CAP)
    return capped


def _log_mean(bets: NDArray[np.float64], dimensions: float) -> NDArray[np.float64]:
    """log of the mean of exp(lam c) for every lam of ``bets``.

    c is a coordinate of a random unit vector in ``dimensions`` d, which need not be whole. The mean
    is Gamma(d/2) (2/lam)^(d/2 - 1) I_(d/2 - 1)(lam), with I the modified Bessel function (K. Mardia
    and P. Jupp, Directional Statistics, 2000, section 9.3.2).
    """
    order = dimensions / 2 - 1
    # ``ive`` is I less its growth, which overflows.
    bessel = np.log(special.ive(order, bets)) + bets
    mean: NDArray[np.float64] = special.gammaln(order + 1) + order * np.log(2 / bets) + bessel
    return mean


class CalibratedDirection:
    """Evidence for one suspect, sharper by the known spread of honest cosines.

    It needs that an honest cosine less the margin has tails no heavier than a coordinate of a
    random unit vector, in as many dimensions as give that spread: exp(lam x) over its mean there
    then has a mean of at most 1. In few dimensions a cosine near 1 says far more than a normal
    number as far out would.
    """

    def __init__(self, honest: HonestSpread) -> None:
        self._honest = honest
        self._evidence = Evidence(len(_CALIBRATED_BETS))

    def add(self, c: float) -> None:
        self._evidence.add(calibrated_log_factors(np.array([c]), self._honest)[0])

    @property
    def log(self) -> float:
        return self._evidence.log
