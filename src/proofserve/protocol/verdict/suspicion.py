"""Whether suspected weights explain an error: what remains without their prediction is shorter.

A validator can compute by how much rounded weights move a result. Of the error of a node with
these weights all but the usual rounding vanishes when that is taken off; the error of an honest
node becomes longer, because its direction has nothing to do with the prediction. Lengths alone
decide, by the honest distribution of lengths (``scale``), so one nonce may say enough.

In some nonces of real models nearly every change pushes the result the same way. There an honest
error may point where a suspect does; but other honest kernels then err so, too (``explained``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.evidence import SHARES, mixed
from proofserve.protocol.verdict.scale import ScaleFit

# How much of a prediction to take off. Weights that are rounded in another way than the suspect's,
# or in some layers alone, move a result by a part of it.
PARTS: Final = (0.25, 0.5, 1.0)
SUSPECT_BETS: Final = len(PARTS) * len(SHARES)
# Of one nonce: rare honest errors must not convict alone.
_LOG_CAP = math.log(1000.0)
# The spread of a prediction's length, as a logarithm, where it was seen on fewer nonces than these.
_UNSEEN_SD, _SEEN = 0.35, 4

Floats = NDArray[np.float64]


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
        """What each nonce gives to every bet, less what is ``explained``: [n, SUSPECT_BETS]."""
        left = [self.log_remaining(fit, part) - explained for part in PARTS]
        capped = [each.clip(-_LOG_CAP, _LOG_CAP) for each in left]
        return np.stack([mixed(each, share) for each in capped for share in SHARES], axis=1)


def explained(beside: Sequence[Compared], fit: ScaleFit) -> Floats:
    """How much likelier errors are as those of an honest run, the best of several: [n], from 0."""
    found = [each.log_remaining(fit, 1.0) for each in beside]
    return np.asarray(np.max(found, axis=0, initial=0.0))
