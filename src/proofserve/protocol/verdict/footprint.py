"""The footprint of a kernel: its errors point where our own run of that kernel errs.

Rounding is deterministic. Two runs that round at the same points share a part of their errors,
although they add up in another order; weights that differ by as little as one step of the served
precision change what is rounded everywhere, and the errors then have nothing in common. So a node
whose errors keep the footprint computed the published weights, whatever else it might have served
(``docs/native.md``). The figure of a nonce is the cosine of the node's error with ours.
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

# A node with other weights keeps at most this part of a footprint in the nonces that it forges: on
# three trained models the whole bank of suspects 0.15 or less of it. What lies in a part of the
# layers keeps more, but no more than a part in all of its nonces.
KEPT: Final = 0.2
# So many honest nonces may keep as little: in some of a real model rounding is amplified until
# nothing is alike (of 24 of SmolLM2 in 1, 1 and 3, by the order in which our run adds up).
_ODD: Final = 0.05
_LOG_CAP = math.log(1000.0)
# The least spread: a calibration has few nonces.
_LEAST_SD = 0.05
# How often the bound of the spread may be wrong.
_WRONG = 0.01

Floats = NDArray[np.float64]
Vector = NDArray[np.float32]


def cosine(error: Vector, other: Vector) -> float:
    """The cosine of two vectors; 0 if one of them is zero, because it has no direction."""
    lengths = float(np.linalg.norm(error)) * float(np.linalg.norm(other))
    return float(np.dot(error, other)) / lengths if lengths > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """The ``mean`` and spread of an honest kernel's cosines with our run of a kernel."""

    mean: float
    sd: float

    @property
    def is_known(self) -> bool:
        """Whether it can be told from none within some hundred nonces."""
        return self.mean > self.sd / 2

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


# Of a server by our emulation of its kernel, where no server was measured. Of vLLM 0.32 on two
# processors and with three models the means were 0.58 to 0.68, the spreads 0.06 to 0.14; those of
# the mean of two cosines, with our run in two orders, 0.05 to 0.11.
_EMULATED, _EMULATED_SD, _EMULATED_SD_OF_TWO = 0.6, 0.12, 0.09
# Servers kept up to so much less than two of our own runs have in common that add up in two orders.
_LOST_BESIDE_TWINS = 0.1


def emulated_footprint(width: int, twins: Sequence[float] = ()) -> Footprint:
    """Of a server by our emulation of its kernel, in vectors of ``width`` values.

    ``twins`` are cosines [n] of two of our own runs of the kernel that add up in two orders, if a
    server is compared with both. Where they show, with two standard errors, that the order takes
    less than usual, a server has more: of a small model that nearly always adds up to the same,
    other weights keep much, too. The cosine of few values spreads by chance: by (1 - c^2) over the
    square root of them.
    """
    by_chance = (1.0 - _EMULATED**2) ** 2 / width
    sd = math.sqrt((_EMULATED_SD_OF_TWO if twins else _EMULATED_SD) ** 2 + by_chance)
    lost = _LOST_BESIDE_TWINS + 2.0 * sd / math.sqrt(max(1, len(twins)))
    return Footprint(max(_EMULATED, float(np.mean(twins or 0.0)) - lost), sd)


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
