"""Where errors point: to what suspected weights would do, or where our own run of a kernel errs.

Suspicion: a validator can compute by how much rounded weights move a result. Of the error of a node
with these weights all but the usual rounding vanishes when that is taken off; the error of an
honest node becomes longer, because its direction has nothing to do with the prediction. Lengths
alone decide, by the honest distribution of lengths (``scale``), so one nonce may say enough. In
some nonces of real models nearly every change pushes the result the same way. There an honest error
may point where a suspect does; but other honest kernels then err so, too (``explained``).

Footprint: rounding is deterministic. Two runs that round at the same points share a part of their
errors, although they add up in another order; weights that differ by as little as one step of the
served precision change what is rounded everywhere, and the errors then have nothing in common. So a
node whose errors keep the footprint computed the published weights, whatever else it might have
served (``docs/native.md``). The figure of a nonce is the cosine of the node's error with ours, less
where the error is much longer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import special

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.evidence import SHARES, mixed
from proofserve.protocol.verdict.scale import ScaleFit

# How much of a prediction to take off. Weights that are rounded in another way than the suspect's,
# or in some layers alone, move a result by a part of it.
PARTS: Final = (0.25, 0.5, 1.0)
# Of one nonce: rare honest errors must not convict alone.
_LOG_CAP = math.log(1000.0)
# The spread of a prediction's length, as a logarithm, where it was seen on fewer nonces than these.
_UNSEEN_SD, _SEEN = 0.35, 4

# A node with other weights keeps at most this part of a footprint in the nonces that it forges: on
# three trained models the whole bank of suspects 0.15 or less of it. What lies in a part of the
# layers keeps more, but no more than a part in all of its nonces.
KEPT: Final = 0.2
# So many honest nonces may keep as little: in some of a real model rounding is amplified until
# nothing is alike (of 24 of SmolLM2 in 1, 1 and 3, by the order in which our run adds up).
_ODD: Final = 0.05
# An error so many times as long as ours is not of rounding alone. What is added may be alike in all
# kernels, as that of a cache in fp8 is, or may leave a part of the footprint by chance.
HIDES: Final = 1.5
# The least spread: a calibration has few nonces.
_LEAST_SD = 0.05
# How often the bound of the spread may be wrong.
_WRONG = 0.01

Floats = NDArray[np.float64]
Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a suspect's weights move results, in the unit of honest errors: log mean, spread."""

    log_mean: float
    sd: float

    def log_ratio(self, fit: ScaleFit, ratios: Floats) -> Floats:
        """The ratio of the suspect over honest kernels by lengths alone: float64 [n].

        ``ratios`` [n] are those of the node's errors. A suspect's error is the honest one and the
        prediction at right angles; the logarithm of its length is taken as normal.
        """
        honest = math.log(fit.median)
        squares = math.exp(2 * honest), math.exp(2 * self.log_mean)
        part = squares[0] / sum(squares)
        mean = math.log(sum(squares)) / 2
        variance = (part * fit.log_sd) ** 2 + ((1.0 - part) * self.sd) ** 2
        logs = np.log(ratios)
        guilty = -((logs - mean) ** 2 / variance + math.log(2 * math.pi * variance)) / 2
        ratio: Floats = guilty - fit.log_density(ratios)
        # Beyond its own mean a longer error is no sign of innocence: another part of it may be.
        return np.where(logs > mean, np.maximum(ratio, 0.0), ratio).clip(-_LOG_CAP, _LOG_CAP)


def reach(ratios: Floats) -> Reach:
    """Of a suspect by the lengths [n] of its predictions, in the unit of honest errors."""
    logs = np.log(ratios)
    if len(logs) >= _SEEN:
        return Reach(float(logs.mean()), float(logs.std(ddof=1)))
    # Their mean spreads, too.
    return Reach(float(logs.mean()), _UNSEEN_SD * math.sqrt(1.0 + 1.0 / len(logs)))


@dataclass(frozen=True, slots=True)
class Compared:
    """Errors beside the predictions of a suspect, or beside an honest run, float64 [n] each.

    ``ratios`` are lengths of errors in the unit of honest ones, NaN of claims without a vector,
    ``predicted`` those of predictions, ``cosines`` of the two.
    """

    ratios: Floats
    predicted: Floats
    cosines: Floats

    def log_remaining(self, fit: ScaleFit, part: float) -> Floats:
        """How much likelier errors are without a ``part`` of predictions: 0 without a vector."""
        taken = part * self.predicted
        before = self.ratios**2
        after = before + taken**2 - 2.0 * self.cosines * self.ratios * taken
        return np.nan_to_num(fit.log_remaining(before, np.maximum(after, 0.0)))

    def log_ratio(self, fit: ScaleFit) -> Floats:
        """The ratio of the suspect over honest kernels: float64 [n]."""
        return self.log_remaining(fit, 1.0).clip(-_LOG_CAP, _LOG_CAP)

    def log_factors(self, fit: ScaleFit, explained: Floats | float = 0.0) -> Floats:
        """What each nonce gives to every bet, less what is ``explained``: [n, bets]."""
        left = [self.log_remaining(fit, part) - explained for part in PARTS]
        capped = [each.clip(-_LOG_CAP, _LOG_CAP) for each in left]
        return np.stack([mixed(each, share) for each in capped for share in SHARES], axis=1)


def explained(beside: Sequence[Compared], fit: ScaleFit) -> Floats:
    """How much likelier errors are as those of an honest run, the best of several: [n], from 0."""
    found = [each.log_remaining(fit, 1.0) for each in beside]
    return np.asarray(np.max(found, axis=0, initial=0.0))


def cosine(error: Vector, other: Vector) -> float:
    """The cosine of two vectors; 0 if one of them is zero, because it has no direction."""
    lengths = float(np.linalg.norm(error)) * float(np.linalg.norm(other))
    return float(np.dot(error, other)) / lengths if lengths > 0.0 else 0.0


def shortened(cosines: Floats, ratios: Floats) -> Floats:
    """``cosines`` [n], less by as much as an error is longer than ``HIDES`` allows.

    Errors are ``ratios`` [n] times as long as ours. Cosines below 0 stay: nearer to 0 is more.
    """
    return np.asarray(np.minimum(cosines, cosines / np.maximum(1.0, ratios / HIDES)))


@dataclass(frozen=True, slots=True)
class Footprint:
    """The ``mean`` and spread of an honest kernel's cosines with our run of a kernel."""

    mean: float
    sd: float

    @property
    def is_known(self) -> bool:
        """Whether it can be told from none within some hundred nonces."""
        return self.mean > self.sd / 2

    def figures(self, cosines: Floats, ratios: Floats) -> Floats:
        """What nonces show of it: ``cosines`` [n] of errors ``ratios`` [n] times as long as ours.

        NaN stands for an error too short to point anywhere, which counts as a usual one.
        """
        return shortened(np.where(np.isnan(cosines), self.mean, cosines), ratios)

    def log_lie(self, figures: Floats, kept: float) -> Floats:
        """The ratio of other weights over this kernel, for each of ``figures`` [n].

        Both as normal, with one spread: other weights with ``kept`` of the mean.
        """
        lost = (1.0 - kept) * self.mean
        ratio: Floats = lost * (self.mean - lost / 2 - figures) / self.sd**2
        return ratio.clip(-_LOG_CAP, _LOG_CAP)

    def log_clearing(self, figures: Floats, share: float, kept: float) -> Floats:
        """What ``figures`` [n] give against a lie on ``share`` of the nonces, and on all of them.

        The latter has ``kept`` of the footprint. float64 [n, 2]; both have to be excluded.
        """
        forged = self.log_lie(figures, KEPT)
        lies = np.stack([mixed(forged, share), self.log_lie(figures, kept)], axis=1)
        return mixed(forged, _ODD)[:, np.newaxis] - lies

    def log_refuting(self, figures: Floats) -> Floats:
        """What ``figures`` [n] give for a lie on each of ``SHARES``: float64 [n, shares]."""
        forged = self.log_lie(figures, KEPT)
        return np.stack([mixed(forged, share) - mixed(forged, _ODD) for share in SHARES], axis=1)


# Of a server by our emulation of its kernel, if nothing says what another order of sums takes: of
# vLLM 0.32 on five kinds of x86 and with three models means were 0.54 to 0.78, spreads 0.05 to
# 0.14.
_EMULATED, _EMULATED_SD = 0.6, 0.12
# A server adds up in an order of its own. On these it kept 0.955 to 1.02 of what two of our own
# runs have in common that add up in two orders.
_KEPT_OF_ORDERS = 0.98
# Less is never expected: where rounding is amplified until little is alike, any weights keep it.
_LEAST_EMULATED = 0.5
# In a nonce in which our two runs have more in common, a server has so much of it more in common
# with them: 0.41 to 0.83 of it, in 12 to 128 values. What is left spreads by 0.4 to 0.85 of the
# spread of our two runs' cosines (ADR 54 says what more or less than 0.82 would clear).
_FOLLOWS, _LEFT = 0.5, 0.82
# A few of these do not show their spread: they count together with so many of the usual one.
_USUAL = 4


def emulated_footprint(width: int, between_orders: Sequence[float] = ()) -> Footprint:
    """Of a server by our emulation of its kernel, in vectors of ``width`` values.

    ``between_orders`` are cosines [n] of two of our own runs of the kernel that add up in two
    orders, if a server is compared with both: then it is the footprint of its ``levelled`` figures.
    The cosine of few values spreads by chance: by (1 - c^2) over the square root of them.
    """
    usual = _EMULATED_SD**2 + (1.0 - _EMULATED**2) ** 2 / width
    if not between_orders:
        return Footprint(_EMULATED, math.sqrt(usual))
    mean = float(np.mean(between_orders))
    squares = float(np.square(np.array(between_orders) - mean).sum())
    spread = math.sqrt((_USUAL * usual + squares) / (_USUAL + len(between_orders) - 1))
    return Footprint(max(_LEAST_EMULATED, _KEPT_OF_ORDERS * mean), max(_LEAST_SD, _LEFT * spread))


def levelled(figures: Floats, between_orders: Floats, usual: float) -> Floats:
    """``figures`` [n] as if our runs in two orders had the ``usual`` in common in each nonce.

    ``between_orders`` [n] is what they have. In some nonces rounding is amplified more than in
    others, on every machine.
    """
    return figures - _FOLLOWS * (between_orders - usual)


def footprint(figures: Floats) -> Footprint:
    """That of an honest kernel by its ``figures`` [n], with a spread that is wrong 1 time in 100.

    For normal figures the sum of squares over the variance has a chi-square distribution with
    n - 1 degrees of freedom. Raises ProtocolError for fewer than 2.
    """
    if len(figures) < 2:
        raise ProtocolError("footprints", f"{len(figures)} are too few, 2 are needed")
    degrees = len(figures) - 1
    chi_square = 2.0 * float(special.gammaincinv(degrees / 2, _WRONG))
    spread = float(figures.std(ddof=1)) * math.sqrt(degrees / chi_square)
    return Footprint(float(figures.mean()), max(_LEAST_SD, spread))
