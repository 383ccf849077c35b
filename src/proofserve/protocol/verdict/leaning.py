"""How honest errors lean: cosines with a suspect's prediction, and of two twins' errors.

A cosine is taken beside the validator's own run of the same nonce, whose error has the same reason
to lean as any other kernel's: what is left is how kernels differ. The tests ask whether that leans
more than it does for honest kernels (``docs/native.md``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import special

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.evidence import symmetric_log_factors

# The least margin of a calibration: kernels that it lacks may lean a little more than its own.
LEAST_MARGIN = 0.05
# Without a calibration: above the largest of the emulated kernels' cosines with the same nonce.
UNCALIBRATED_MARGIN = 0.1
_SYMMETRIC_BETS = np.array([0.5, 1.0, 2.0, 4.0])
UNCALIBRATED_BETS = len(_SYMMETRIC_BETS)
# An engine in float32 may send most of the published vectors: their errors have no direction.
LEAST_SD = 0.01
# How often a bound of the honest spread may be wrong, and the normal quantile of that.
_WRONG, _Z = 0.01, 2.33
# In standard deviations of an honest figure.
_BETS = np.array([0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0])
LEANING_BETS = len(_BETS)
# Of one nonce: rare honest errors need not be normal, and must not convict alone.
_LOG_CAP = math.log(1000.0)

Vector = NDArray[np.float32]
Floats = NDArray[np.float64]


def cosine(error: Vector, prediction: Vector) -> float:
    """The cosine of two vectors; 0 if one of them is zero, because it has no direction."""
    lengths = float(np.linalg.norm(error)) * float(np.linalg.norm(prediction))
    return float(np.dot(error, prediction)) / lengths if lengths > 0.0 else 0.0


def own_share(honest: Sequence[tuple[Floats, Floats]]) -> float:
    """How much of our own cosine to take off an honest one: 0 to 1, the best for these kernels.

    Each pair has a kernel's cosines [n] and our own of the same nonces. The share is the slope of
    the one by the other within kernels, which leaves the smallest spread; what is subtracted beyond
    it only adds the noise of our own run, as with the 12 values of artifact-v1.
    """
    together = apart = 0.0
    for theirs, ours in honest:
        centred = ours - ours.mean()
        together += float(centred @ (theirs - theirs.mean()))
        apart += float(centred @ centred)
    return min(1.0, max(0.0, together / apart)) if apart > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class HonestLean:
    """Honest figures ``c - share * own c``: their mean, and bounds on it and on the deviation."""

    mean: float
    sd: float
    margin: float
    share: float

    def wider(self, room: float) -> "HonestLean":
        """The bounds ``room`` times as wide, for a calibration that lacks honest kernels."""
        return replace(self, sd=self.sd * room, margin=self.margin * room)

    def log_factors(self, figures: Floats) -> Floats:
        """What each of ``figures`` [n] gives to every bet: float64 [n, bets].

        It needs that an honest figure less the margin has tails no heavier than those of a random
        direction. A figure over ``1 + share`` lies in [-1, 1] as a coordinate of a unit vector
        does, so that is the yardstick: exp(lam x) over its mean there, in as many dimensions as
        give that spread, then has a mean of at most 1. In few dimensions a figure near 1 says far
        more than a normal number as far out would.
        """
        reach = 1.0 + self.share
        sd = self.sd / reach
        bets = _BETS / sd
        leaning = bets * (figures[:, np.newaxis] - self.margin) / reach
        capped: Floats = np.minimum(leaning - _log_mean(bets, sd**-2), _LOG_CAP)
        return capped


def honest_lean(figures: Floats, share: float) -> HonestLean:
    """The bounds that the figures [n] of honest nonces give, each wrong 1 time in 100.

    For normal figures the sum of squares over the variance has a chi-square distribution with
    n - 1 degrees of freedom. Raises ProtocolError for fewer than 2.
    """
    if len(figures) < 2:
        raise ProtocolError("cosines", f"{len(figures)} are too few, 2 are needed")
    degrees = len(figures) - 1
    mean, sd = float(figures.mean()), max(LEAST_SD, float(figures.std(ddof=1)))
    highest = mean + _Z * sd / math.sqrt(len(figures))
    chi_square = 2.0 * float(special.gammaincinv(degrees / 2, _WRONG))
    widest = sd * math.sqrt(degrees / chi_square)
    return HonestLean(mean, widest, max(LEAST_MARGIN, highest), share)


def uncalibrated_log_factors(figures: Floats) -> Floats:
    """What ``figures`` [n] give to every bet without a calibration: float64 [n, bets].

    A figure is a cosine less the largest of honest kernels that were emulated on the same nonce.
    Valid if the sign of the figure less ``UNCALIBRATED_MARGIN`` is at most as often plus as minus.
    """
    return symmetric_log_factors(figures[:, np.newaxis] - UNCALIBRATED_MARGIN, _SYMMETRIC_BETS)


def _log_mean(bets: Floats, dimensions: float) -> Floats:
    """log of the mean of exp(lam c) for every lam of ``bets``.

    c is a coordinate of a random unit vector in ``dimensions`` d, which need not be whole. The mean
    is Gamma(d/2) (2/lam)^(d/2 - 1) I_(d/2 - 1)(lam), with I the modified Bessel function (K. Mardia
    and P. Jupp, Directional Statistics, 2000, section 9.3.2).
    """
    # A spread wider than a coordinate's in one dimension has no such vector; 1 is the widest.
    order = max(dimensions, 1.0) / 2 - 1
    # ``ive`` is I less its growth, which overflows.
    with np.errstate(divide="ignore"):
        bessel = np.log(special.ive(order, bets)) + bets
    mean: Floats = special.gammaln(order + 1) + order * np.log(2 / bets) + bessel
    # In thousands of dimensions ``ive`` underflows; a coordinate's tails are below the normal ones.
    return np.where(np.isfinite(mean), mean, bets**2 / (2 * dimensions))
