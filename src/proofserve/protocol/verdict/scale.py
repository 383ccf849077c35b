"""The scale test: how large distances are against honest ones (``docs/native.md``).

Honest ``u = (d / (g s))^2`` is fitted by the density (1 + u)^(-(nu1 + nu2)/2) u^(nu1/2 - 1), an F
distribution with its ratio taken into ``s``. A prover whose errors are rho times as large has the
same shape, stretched; the ratio of the two densities is the bet on rho.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.evidence import Evidence

SCALES = (1.4, 2.0, 4.0, 12.0)
# A cleared node is none whose errors are all this many times too large, nor one that forges some
# nonces without the model.
CLEARED_OF = (2.0, 12.0)
# A prover may compute some nonces honestly: the shares that it forges.
SHARES = (1.0, 0.4, 0.1)
# Room for two engines' rounding, and for a deployment noisier than the calibrated one.
ALLOWANCE = 1.45
# Standard errors by which the mean of a bet on the calibration's own pairs may be too low.
_MEAN_ERRORS = 2.33
# Bounds of the logarithms of nu1 and nu2. Without the upper one a fit of distances with light
# tails runs to infinity, and its scale with it.
_SHAPES = (math.log(0.5), math.log(1000.0))
# The largest factor that one nonce may contribute: below a scale of 3, and from there on.
_CAP_SMALL, _CAP_LARGE, _LARGE = 25.0, 1000.0, 3.0

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScaleFit:
    """``s`` in the unit of the distances; ``nu1`` and ``nu2`` shape the fit's two ends.

    Ratios of two distances are fitted alike; then ``s`` is a plain number.

    ``norms`` are the divisors of the bets, by ``SCALES``: each is at least the bet's mean over the
    honest distances of the calibration.
    """

    s: float
    nu1: float
    nu2: float
    norms: tuple[float, ...]

    def quantile(self, share: float) -> float:
        """The distance below which ``share`` (0 to 1) of the honest distances lie, by the fit."""
        # u is a beta prime number, u / (1 + u) a beta one.
        return self.s * math.sqrt(float(stats.betaprime.ppf(share, self.nu1 / 2, self.nu2 / 2)))

    def log_bets(self, distances: Floats) -> Floats:
        """log L_rho of ``distances`` [n], infinite ones included: float64 [n, len(SCALES)]."""
        scaled = (distances / (ALLOWANCE * self.s)) ** 2
        norms: Floats = np.log(self.norms)
        return _log_bets(scaled, self.nu1, self.nu2) - norms

    def log_factors(self, distances: Floats) -> Floats:
        """What each of ``distances`` [n] gives to every bet: float64 [n, len(SCALES * SHARES)]."""
        bets = self.log_bets(distances)
        return np.concatenate([_mixed(bets, share) for share in SHARES], axis=1)

    def log_clearing(self, distances: Floats, share: float = 1.0) -> Floats:
        """What each of ``distances`` [n] gives against the frauds of ``ScaleClearing``: [n, 2]."""
        u = (distances / self.s) ** 2
        ratios = _log_ratios(u, self.nu1, self.nu2, np.array(CLEARED_OF))
        return -np.stack([ratios[:, 0], _mixed(ratios[:, 1], share)], axis=1)


def fitted(distances: Floats) -> ScaleFit:
    """The fit of honest ``distances`` [n], all above 0, by maximum likelihood.

    Raises ProtocolError for less than two distances, or one that is not finite and above 0.
    """
    if len(distances) < 2 or not (np.isfinite(distances) & (distances > 0)).all():
        raise ProtocolError("distances", "at least two are needed, finite and above 0")
    squares = distances**2
    start = np.array([math.log(float(np.median(squares))), math.log(10.0), math.log(10.0)])
    bounds = ((None, None), _SHAPES, _SHAPES)
    found = optimize.minimize(_misfit, start, args=(squares,), method="Nelder-Mead", bounds=bounds)
    scale, nu1, nu2 = np.exp(found.x).tolist()
    bets = np.exp(_log_bets(squares / (scale * ALLOWANCE**2), nu1, nu2))
    error = bets.std(axis=0, ddof=1) / math.sqrt(len(bets))
    norms = np.maximum(1.0, bets.mean(axis=0) + _MEAN_ERRORS * error)
    return ScaleFit(math.sqrt(scale), nu1, nu2, tuple(norms.tolist()))


def ratios_tell_more(distances: Floats, ratios: Floats) -> bool:
    """Whether honest ``ratios`` to our own errors spread at most half as much as ``distances``.

    Both float64 [n], above 0. Otherwise a ratio only adds the noise of our own error, as with the
    12 values of artifact-v1.
    """
    return bool(np.log(ratios).std() <= np.log(distances).std() / 2)


class ScaleEvidence:
    """Evidence that a prover's distances are larger than an honest node's."""

    def __init__(self, fit: ScaleFit) -> None:
        self._fit = fit
        self._evidence = Evidence(len(SCALES) * len(SHARES))

    def add(self, distance: float) -> None:
        """One more nonce; a missing or malformed claim is infinitely far."""
        self._evidence.add(self._fit.log_factors(np.array([distance]))[0])

    @property
    def log(self) -> float:
        return self._evidence.log


class ScaleClearing:
    """Evidence against two frauds, one of small and one of gross errors.

    The errors of the first are ``CLEARED_OF[0]`` times as large as calibrated, in all nonces; those
    of the second ``CLEARED_OF[1]`` times, in ``share`` of them. Each factor is the ratio of the
    honest density to the fraud's, so that its mean is 1 for such a fraud, and lower for a larger
    one. ``log`` is the lower of the two.
    """

    def __init__(self, fit: ScaleFit, share: float = 1.0) -> None:
        self._fit = fit
        self._share = share
        self._logs = np.zeros(len(CLEARED_OF))

    def add(self, distance: float) -> None:
        self._logs += self._fit.log_clearing(np.array([distance]), self._share)[0]

    @property
    def log(self) -> float:
        return float(self._logs.min())


def _mixed(log_ratios: Floats, share: float) -> Floats:
    """log of 1 - share + share * ratio: what a prover gives that forges this share."""
    # log1p would be inexact where the share is 1 and the ratio nearly 0.
    mixed: Floats = log_ratios if share == 1.0 else np.log1p(share * np.expm1(log_ratios))
    return mixed


def _log_bets(u: Floats, nu1: float, nu2: float) -> Floats:
    """The logarithms of the capped bets, before their norms: float64 [len(u), len(SCALES)]."""
    scales = np.array(SCALES)
    caps = np.where(scales < _LARGE, _CAP_SMALL, _CAP_LARGE)
    capped: Floats = np.minimum(np.log(caps), _log_ratios(u, nu1, nu2, scales))
    return capped


def _log_ratios(u: Floats, nu1: float, nu2: float, scales: Floats) -> Floats:
    """log of rho^-nu1 ((1 + u) / (1 + u/rho^2))^((nu1 + nu2)/2): float64 [len(u), len(scales)]."""
    with np.errstate(invalid="ignore"):
        ratio = np.log1p(u)[:, np.newaxis] - np.log1p(u[:, np.newaxis] / scales**2)
    # Both logarithms are infinite for an infinite u; their difference is then log rho^2.
    ratio = np.where(np.isnan(ratio), 2 * np.log(scales), ratio)
    return (nu1 + nu2) / 2 * ratio - nu1 * np.log(scales)


def _misfit(logs: Floats, squares: Floats) -> float:
    """The negative log likelihood of a scale, nu1 and nu2, given by their logarithms."""
    scale, nu1, nu2 = np.exp(logs)
    u = squares / scale
    density = (nu1 / 2 - 1) * np.log(u) - (nu1 + nu2) / 2 * np.log1p(u)
    constant = special.betaln(nu1 / 2, nu2 / 2) + math.log(scale)
    return float(len(u) * constant - density.sum())
