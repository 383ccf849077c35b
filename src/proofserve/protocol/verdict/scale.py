"""How large errors are against honest ones (``docs/native.md``).

The figure of a nonce is the length of its error over that of the validator's own. Honest
``u = (r / (g s))^2`` is fitted by the density (1 + u)^(-(nu1 + nu2)/2) u^(nu1/2 - 1), an F
distribution with its ratio taken into ``s``. A prover whose errors are rho times as large has the
same shape, stretched; the ratio of the two densities is the bet on rho.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.evidence import SHARES, mixed

SCALES = (1.4, 2.0, 4.0, 12.0)
# Kernels that were not measured may round up to this many times as much as those of a calibration.
CONVICTING: Final = 2.0
# Standard errors by which the mean of a bet on the calibration's own figures may be too low.
_MEAN_ERRORS = 2.33
# Of n honest figures none shows what happens more rarely than 4.6 times in n, 99 % confident
# (exp(-4.6) is 0.01). The largest factor of one nonce is capped so that such figures add at most
# ``_UNSEEN`` to the mean of a bet. So a small calibration convicts more slowly, at any alpha.
_RARE, _UNSEEN = 4.6, 0.1
# An error so far above the largest honest one that, by the power with which the fit's tail falls,
# it adds less than ``_UNSEEN`` too is capped by ``_CAP_LARGE`` alone. At least so many times.
_GROSS = 1.5
# The largest factor of a bet below a scale of 3, and from there on.
_CAP_SMALL, _CAP_LARGE, _LARGE = 25.0, 1000.0, 3.0
# Bounds of the logarithms of nu1 and nu2. Without the upper one a fit of figures with light
# tails runs to infinity, and its scale with it.
_SHAPES = (math.log(0.5), math.log(1000.0))

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScaleFit:
    """``s`` in the unit of the figures; ``nu1`` and ``nu2`` shape the fit's two ends."""

    s: float
    nu1: float
    nu2: float

    def quantile(self, share: float) -> float:
        """The figure below which ``share`` (0 to 1) of the honest ones lie, by the fit."""
        # u / (1 + u) is a beta number, and so is 1 / (1 + u). scipy.stats has the distribution of u
        # too, but its import takes a second and 30 MB of a validator's memory.
        a, b = self.nu1 / 2, self.nu2 / 2
        u = special.betaincinv(a, b, share) / special.betainccinv(b, a, share)
        return self.s * math.sqrt(float(u))

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def log_sd(self) -> float:
        """The standard deviation of the logarithm of a figure, whose square is an F number."""
        both = special.polygamma(1, self.nu1 / 2) + special.polygamma(1, self.nu2 / 2)
        return math.sqrt(float(both)) / 2

    def log_density(self, figures: Floats) -> Floats:
        """Of the logarithm of each of ``figures`` [n]."""
        u = (figures / self.s) ** 2
        constant = math.log(2.0) - float(special.betaln(self.nu1 / 2, self.nu2 / 2))
        density: Floats = (
            self.nu1 / 2 * np.log(u) - (self.nu1 + self.nu2) / 2 * np.log1p(u) + constant
        )
        return density

    def log_remaining(self, before: Floats, after: Floats) -> Floats:
        """How much likelier honest errors are as vectors of the squared lengths ``after`` [n].

        Against ``before`` [n]. Errors that point anywhere, with lengths of this fit, are likely by
        (1 + u)^(-(nu1 + nu2)/2) in as many dimensions as ``nu1``.
        """
        u = np.log1p(before / self.s**2) - np.log1p(after / self.s**2)
        ratio: Floats = (self.nu1 + self.nu2) / 2 * u
        return ratio

    def wider(self, room: float) -> "ScaleFit":
        return replace(self, s=self.s * room)


def fitted(figures: Floats) -> ScaleFit:
    """The fit of honest ``figures`` [n], all above 0, by maximum likelihood.

    Raises ProtocolError for less than two figures, or one that is not finite and above 0.
    """
    if len(figures) < 2 or not (np.isfinite(figures) & (figures > 0)).all():
        raise ProtocolError("figures", "at least two are needed, finite and above 0")
    squares = figures**2
    start = np.array([math.log(float(np.median(squares))), math.log(10.0), math.log(10.0)])
    bounds = ((None, None), _SHAPES, _SHAPES)
    found = optimize.minimize(_misfit, start, args=(squares,), method="Nelder-Mead", bounds=bounds)
    scale, nu1, nu2 = np.exp(found.x).tolist()
    return ScaleFit(math.sqrt(scale), nu1, nu2)


class SizeBets:
    """Bets that errors are more than ``allowance`` times as large as honest ones.

    ``honest`` float64 [n] are the figures that ``fit`` is of. On them no bet wins on average, with
    room for what n figures cannot show.
    """

    def __init__(self, fit: ScaleFit, honest: Floats, allowance: float) -> None:
        self._fit = fit
        self._unit = allowance * fit.s
        scales = np.array(SCALES)
        most = np.where(scales < _LARGE, _CAP_SMALL, _CAP_LARGE)
        self._caps = np.log(np.clip(_UNSEEN * len(honest) / _RARE, 1.0, most))
        self._gross_caps = np.log(most)
        unlikely = _UNSEEN * len(honest) / (_RARE * _CAP_LARGE)
        self._gross = allowance * float(honest.max()) * max(_GROSS, unlikely ** (-1.0 / fit.nu2))
        self._norms = np.zeros(len(SCALES))
        bets = np.exp(self._log_bets(honest))
        error = bets.std(axis=0, ddof=1) / math.sqrt(len(bets))
        self._norms = np.log(np.maximum(1.0, bets.mean(axis=0) + _MEAN_ERRORS * error + _UNSEEN))

    def log_factors(self, figures: Floats) -> Floats:
        """What each of ``figures`` [n], infinite ones included, gives to every bet: [n, bets]."""
        bets = self._log_bets(figures)
        return np.concatenate([mixed(bets, share) for share in SHARES], axis=1)

    def _log_bets(self, figures: Floats) -> Floats:
        ratios = _log_ratios((figures / self._unit) ** 2, self._fit.nu1, self._fit.nu2, SCALES)
        is_gross = (figures > self._gross)[:, np.newaxis]
        caps = np.where(is_gross, self._gross_caps, self._caps)
        capped: Floats = np.minimum(caps, ratios) - self._norms
        return capped


def _log_ratios(u: Floats, nu1: float, nu2: float, of: Floats | tuple[float, ...]) -> Floats:
    """log of rho^-nu1 ((1 + u) / (1 + u/rho^2))^((nu1 + nu2)/2) for each rho: [len(u), len(of)]."""
    scales = np.asarray(of)
    with np.errstate(invalid="ignore"):
        ratio = np.log1p(u)[:, np.newaxis] - np.log1p(u[:, np.newaxis] / scales**2)
    # Both logarithms are infinite for an infinite u; their difference is then log rho^2.
    ratio = np.where(np.isnan(ratio), 2 * np.log(scales), ratio)
    logs: Floats = (nu1 + nu2) / 2 * ratio - nu1 * np.log(scales)
    return logs


def _misfit(logs: Floats, squares: Floats) -> float:
    """The negative log likelihood of a scale, nu1 and nu2, given by their logarithms."""
    scale, nu1, nu2 = np.exp(logs)
    u = squares / scale
    density = (nu1 / 2 - 1) * np.log(u) - (nu1 + nu2) / 2 * np.log1p(u)
    constant = special.betaln(nu1 / 2, nu2 / 2) + math.log(scale)
    return float(len(u) * constant - density.sum())
