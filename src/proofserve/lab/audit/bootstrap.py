"""Verifications of resampled nonces: after how many nonces each test convicts a prover.

The factors of a test are independent from nonce to nonce, so its evidence along a verification is
the sum of the increments of the nonces drawn. Only ranks depend on the nonces before.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.audit.conviction import ConvictionRule
from proofserve.lab.audit.evidence import Increments
from proofserve.lab.audit.measurement import Floats
from proofserve.protocol.verdict.rank import LEAST_PAIRS, rank_log_factors
from proofserve.protocol.verdict.scale import ALLOWANCE

RUNS = 2000
# The tests of a verification by default, which together have alpha: the paired one, or else the
# scale test, and these.
PAIRED, SCALE, DIRECTION, TWINS = "paired", "scale", "direction", "twins"
# Beside them, each with all of alpha.
RANK, CERTIFIED = "rank", "certified"
# Nonces that are simulated in one go; fewer at first, since most frauds are convicted early.
FIRST_STEP, STEP = 8, 32
# The likeliest suspects, whose evidence is followed; the others convict later.
FOLLOWED = 4
# Expected runs, of all, below which none is simulated to be convicted.
NEGLIGIBLE = 0.01

Counts = NDArray[np.int64]
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NoncesNeeded:
    """The nonces of half of the verifications, and of a share ``power``; None if more than most.

    ``share`` is that of the verifications that end so within the most nonces.
    """

    median: int | None
    at_power: int | None
    share: float


@dataclass(frozen=True, slots=True)
class BootstrapResult:
    """``tests`` by name, and which of them are the default ones.

    ``cleared`` is how a default verification ends that clears the prover before it convicts.
    ``growth`` is by how much each bet of a default test, float64 [bets], grows with a nonce on
    average; of the direction, the likeliest suspect's.
    """

    tests: dict[str, NoncesNeeded]
    default: tuple[str, ...]
    cleared: NoncesNeeded
    growth: dict[str, Floats]


@dataclass(frozen=True, slots=True)
class Draws:
    """The nonces of each run, int64 [runs, most], and the chance of each nonce [n]."""

    rows: Rows
    chances: Floats

    @property
    def never(self) -> int:
        return int(self.rows.shape[1]) + 1


class Bootstrap:
    """Draws the same ``runs`` sequences of nonces for every prover that was measured on as many."""

    def __init__(self, rule: ConvictionRule, runs: int = RUNS) -> None:
        self._rule = rule
        self._runs = runs

    def result(
        self, made: Increments, chances: Floats | None, pairs: tuple[float, ...]
    ) -> BootstrapResult:
        """How verifications of the prover end; ``chances`` [n] of its nonces, None if all alike.

        ``pairs`` are the honest distances of the rank test.
        """
        draws = self._draws(len(made.distances), chances)
        stops = self._default_stops(made, draws)
        direction, unless_ruled_out, ruled_out = self._direction(made, draws, len(stops) + 1)
        cleared = self._cleared(made, draws, ruled_out)
        convicted = np.minimum.reduce([unless_ruled_out, *stops.values()])
        cleared = np.where(cleared < convicted, cleared, draws.never)
        default = (*stops, DIRECTION)
        tests = {**stops, DIRECTION: direction}
        if PAIRED in stops:
            limit = -math.log(self._rule.alpha)
            tests[SCALE] = first_passages(made.scale, draws, limit)
        tests[CERTIFIED] = self._of_suspects(made.certified, draws, self._rule.alpha)[0]
        if len(pairs) >= LEAST_PAIRS:
            tests[RANK] = self._ranks(made.distances, draws, pairs)
        needed = {name: self._needed(each) for name, each in tests.items()}
        growth = _growth(made, draws.chances)
        return BootstrapResult(needed, default, self._needed(cleared), growth)

    def _draws(self, count: int, chances: Floats | None) -> Draws:
        random, shape = np.random.default_rng(0), (self._runs, self._rule.max_nonces)
        if chances is None:
            return Draws(random.integers(0, count, shape), np.full(count, 1.0 / count))
        return Draws(random.choice(count, shape, p=chances), chances)

    def _default_stops(self, made: Increments, draws: Draws) -> dict[str, Counts]:
        """The default tests without the direction, at their share of alpha."""
        found = _default_factors(made)
        limit = math.log((len(found) + 1) / self._rule.alpha)
        return {name: first_passages(each, draws, limit) for name, each in found.items()}

    def _direction(
        self, made: Increments, draws: Draws, tests: int
    ) -> tuple[Counts, Counts, Counts]:
        """When a suspect convicts, when one does that is not ruled out, and when all are."""
        convicted, each = self._of_suspects(made.direction, draws, self._rule.alpha / tests)
        limit = -math.log(1.0 - self._rule.power)
        unless, all_out = np.full(len(draws.rows), draws.never), np.zeros(len(draws.rows), int)
        for suspect in range(made.innocence.shape[1]):
            out = first_passages(made.innocence[:, [suspect]], draws, limit)
            all_out = np.maximum(all_out, out)
            if suspect in each:
                stops = each[suspect]
                unless = np.minimum(unless, np.where(stops <= out, stops, draws.never))
        return convicted, unless, all_out

    def _of_suspects(
        self, factors: Floats, draws: Draws, alpha: float
    ) -> tuple[Counts, dict[int, Counts]]:
        """The first conviction by any suspect, and by each as far as it comes before the others."""
        limit = math.log(factors.shape[1] / alpha)
        first, each = np.full(len(draws.rows), draws.never), {}
        growth = np.einsum("n,nsb->sb", draws.chances, factors).max(axis=1)
        for suspect in np.argsort(-growth)[:FOLLOWED].tolist():
            each[suspect] = first_passages(factors[:, suspect], draws, limit, until=first)
            first = np.minimum(first, each[suspect])
        return first, each

    def _cleared(self, made: Increments, draws: Draws, ruled_out: Counts) -> Counts:
        """When all tests clear at once, with all suspects ruled out."""
        limit = -math.log(1.0 - self._rule.power)
        clear = np.arange(1, draws.never) >= ruled_out[:, np.newaxis]
        for of_test in made.clearing.T:
            clear &= np.cumsum(of_test[draws.rows], axis=1) >= limit
        return np.where(clear.any(axis=1), clear.argmax(axis=1) + 1, draws.never)

    def _ranks(self, distances: Floats, draws: Draws, pairs: tuple[float, ...]) -> Counts:
        allowed = distances / ALLOWANCE
        among_pairs = len(pairs) - np.searchsorted(np.sort(pairs), allowed)
        stops = np.full(len(draws.rows), draws.never)
        running = np.arange(len(draws.rows))
        # By run and measured nonce: how many of those drawn before are at least as far.
        above = np.zeros((len(running), len(allowed)), int)
        logs = np.zeros((len(running), rank_log_factors(np.ones(1)).shape[1]))
        for n, drawn_at_n in enumerate(draws.rows.T):
            drawn = drawn_at_n[running]
            count = among_pairs[drawn] + above[np.arange(len(running)), drawn]
            logs += rank_log_factors((count + 1) / (len(pairs) + n + 1))
            above += allowed[drawn, np.newaxis] >= allowed
            over = log_mean(logs) >= -math.log(self._rule.alpha)
            stops[running[over]] = n + 1
            running, above, logs = running[~over], above[~over], logs[~over]
            if not len(running):
                break
        return stops

    def _needed(self, stops: Counts) -> NoncesNeeded:
        ordered, most = np.sort(stops), self._rule.max_nonces

        def at(share: float) -> int | None:
            nonces = int(ordered[math.ceil(share * len(ordered)) - 1])
            return nonces if nonces <= most else None

        return NoncesNeeded(at(0.5), at(self._rule.power), float((stops <= most).mean()))


def first_passages(
    factors: Floats, draws: Draws, limit: float, until: Counts | None = None
) -> Counts:
    """The nonces after which each run's evidence is at least ``limit``: int64 [runs].

    ``factors`` [n, bets] are logarithms. Where no nonces of the run are enough it is
    ``draws.never``; a run is followed up to ``until``.
    """
    runs, most = draws.rows.shape
    stops = np.full(runs, draws.never)
    if runs * math.exp(-limit) < NEGLIGIBLE and _hopeless(factors, draws.chances):
        return stops
    running, logs, start = np.arange(runs), np.zeros((runs, factors.shape[1])), 0
    while start < most and len(running):
        step = FIRST_STEP if start == 0 else STEP
        drawn = factors[draws.rows[running, start : start + step]]
        paths = logs[:, np.newaxis] + np.cumsum(drawn, axis=1)
        over = _reached(paths, limit)
        ended = over.any(axis=1)
        stops[running[ended]] = start + 1 + over[ended].argmax(axis=1)
        start += step
        kept = ~ended if until is None else ~ended & (until[running] > start)
        running, logs = running[kept], paths[kept, -1]
    return stops


def _default_factors(made: Increments) -> dict[str, Floats]:
    """Those of the default tests without the direction, [n, bets] each."""
    found = {SCALE: made.scale} if made.paired is None else {PAIRED: made.paired}
    return found if made.twins is None else {**found, TWINS: made.twins}


def _growth(made: Increments, chances: Floats) -> dict[str, Floats]:
    by_suspect = np.einsum("n,nsb->sb", chances, made.direction)
    likeliest = by_suspect[by_suspect.max(axis=1).argmax()]
    found = {name: chances @ each for name, each in _default_factors(made).items()}
    return {**found, DIRECTION: likeliest}


def _hopeless(factors: Floats, chances: Floats) -> bool:
    """Whether no bet grows on average: by Ville's inequality hardly a run is then convicted."""
    with np.errstate(over="ignore"):
        return bool((chances @ np.exp(factors) <= 1.0).all())


def _reached(logs: Floats, limit: float) -> NDArray[np.bool_]:
    # The mean is at most the largest, which is quicker to compute.
    over: NDArray[np.bool_] = logs.max(axis=-1) >= limit
    over[over] = log_mean(logs[over]) >= limit
    return over


def log_mean(logs: Floats) -> Floats:
    """The logarithm of the mean of exp(``logs``) along the last axis."""
    highest = logs.max(axis=-1, keepdims=True)
    found: Floats = highest[..., 0] + np.log(np.exp(logs - highest).mean(axis=-1))
    return found
