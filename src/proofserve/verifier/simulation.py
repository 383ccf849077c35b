"""Verifications of resampled nonces: how many end in which verdict, and after how many nonces.

The factors of a test are independent from nonce to nonce, so its evidence along a verification is
the sum of the increments of the nonces drawn. Every suspect is computed for every nonce here, which
only gives a verdict more chances to convict than ``verify`` has.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.twins import twin_log_clearing
from proofserve.verifier.judges import Chances
from proofserve.verifier.populations import (
    TWINS,
    UNKNOWN,
    Expected,
    HonestPopulations,
    Population,
    RunFigures,
)

# Tests that can convict share alpha: sizes and directions.
CONVICTING_TESTS = 2
# Nonces that are simulated in one go; fewer at first, since most frauds are convicted early.
FIRST_STEP, STEP = 8, 64
# Runs that are followed together: their sums stay in a processor's cache.
AT_ONCE = 512
# Expected runs, of all, below which none is simulated to reach a limit.
NEGLIGIBLE = 0.01
# Powers of a bet by which its chance to reach a limit is bounded.
_POWERS = np.array([1.0, 0.9, 0.75, 0.5, 0.25])

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """What a node shows beside the validator's own run, on the same n nonces.

    ``ratios`` float64 [n] of lengths are infinite without a vector. ``twins`` float64 [n], and
    ``leans`` float64 [n] by suspect, have our own share taken off; NaN without a vector.
    """

    ratios: Floats
    twins: Floats | None
    leans: Mapping[str, Floats]

    def __len__(self) -> int:
        return len(self.ratios)


def node_figures(node: RunFigures, own: RunFigures, honest: HonestPopulations) -> NodeFigures:
    """Of the nonces of ``node`` on which the suspects were measured, all if none were."""
    measured = min((len(values) for values in node.cosines.values()), default=len(node.lengths))
    rows = node.rows[:measured]
    twins = None
    if node.alike is not None and own.alike is not None and honest.has_twins:
        twins = node.alike[:measured] - honest.shares.leans[TWINS] * own.alike[rows]
    leans = {
        name: values[:measured] - honest.shares.lean(name) * own.cosines[name][rows]
        for name, values in node.cosines.items()
    }
    ratios = honest.shares.ratios(node.lengths[:measured], own.lengths[rows])
    return NodeFigures(ratios, twins, leans)


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """The nonces of each run, int64 [runs, most], and the chance of each nonce [n]."""

    rows: Counts
    chances: Floats

    @property
    def most(self) -> int:
        return int(self.rows.shape[1])

    @property
    def never(self) -> int:
        return self.most + 1

    def of(self, runs: Counts) -> "Draws":
        """Those of ``runs`` alone, itself if they are all."""
        return self if len(runs) == len(self.rows) else Draws(self.rows[runs], self.chances)


def draws(count: int, runs: int, most: int, chances: Floats | None = None, seed: int = 0) -> Draws:
    """``most`` of ``count`` nonces for each of ``runs``, with replacement."""
    random, shape = np.random.default_rng(seed), (runs, most)
    if chances is None:
        return Draws(random.integers(0, count, shape), np.full(count, 1.0 / count))
    return Draws(random.choice(count, shape, p=chances), chances)


@dataclass(frozen=True, slots=True)
class Endings:
    """When each run was convicted or cleared, int64 [runs], beyond ``most`` if it was not.

    ``refuted`` bool [runs]: no population explains the node. ``by_test`` is when each test alone
    would have convicted. ``closest`` is the population most like the node on average.
    """

    most: int
    convicted_at: Counts
    cleared_at: Counts
    refuted: NDArray[np.bool_]
    by_test: Mapping[str, Counts]
    closest: str

    @property
    def convicted(self) -> int:
        return int(np.count_nonzero(self._is_convicted))

    @property
    def cleared(self) -> int:
        return int(np.count_nonzero((self.cleared_at <= self.most) & ~self._is_convicted))

    @property
    def unexplained(self) -> int:
        """No verdict, exit code 3: neither honest nor fraud explains the errors."""
        return int(np.count_nonzero(self.refuted & self._is_open))

    @property
    def undecided(self) -> int:
        return int(np.count_nonzero(~self.refuted & self._is_open))

    def nonces_to(self, ended: Counts, share: float) -> int | None:
        """The nonces after which ``share`` of the runs have ended so; None if more than most."""
        nonces = int(np.sort(ended)[math.ceil(share * len(ended)) - 1])
        return nonces if nonces <= self.most else None

    @property
    def _is_convicted(self) -> NDArray[np.bool_]:
        return (self.convicted_at <= self.most) & (self.convicted_at <= self.cleared_at)

    @property
    def _is_open(self) -> NDArray[np.bool_]:
        return (self.convicted_at > self.most) & (self.cleared_at > self.most)


def simulated(
    node: NodeFigures, honest: HonestPopulations, chances: Chances, drawn: Draws
) -> Endings:
    """Verifications of ``node``, as ``verify`` runs them by default, at ``chances`` in all."""
    guilty = {
        name: replace(expected, sd=max(expected.sd, honest.widest_sd(name)))
        for name in node.leans
        for expected in [honest.expected.get(name, UNKNOWN)]
    }
    out = ruled_out(node.leans, guilty, chances, drawn)
    members = _closest_first(node, honest, chances)
    cleared = np.full(len(drawn.rows), drawn.never)
    for member in members:
        cleared = np.minimum(cleared, member.cleared(drawn, out, cleared - 1))
    return Endings(
        most=drawn.most,
        convicted_at=_by_all(members, drawn, _Member.convicted),
        cleared_at=cleared,
        refuted=_by_all(members, drawn, _Member.refuted) <= drawn.most,
        by_test={
            "paired": _by_all(members, drawn, _Member.paired),
            "direction": _by_all(members, drawn, _Member.direction),
        },
        closest=min(members, key=lambda member: member.distance).name,
    )


def convictions(
    node: NodeFigures, honest: HonestPopulations, chances: Chances, drawn: Draws
) -> Counts:
    """When each run is convicted, int64 [runs], if clearing did not end it before."""
    return _by_all(_closest_first(node, honest, chances), drawn, _Member.convicted)


class _Member:
    """One population, and what the node's figures are to it."""

    def __init__(self, of: Population, node: NodeFigures, chances: Chances) -> None:
        self._of = of
        self._node = node
        self._chances = chances
        self._limit = math.log(CONVICTING_TESTS / chances.alpha)
        self.name = of.name
        # Several questions ask again what one of them has found out.
        self._found: dict[tuple[str, Draws], Counts] = {}
        self._clearing = of.fit.log_clearing(node.ratios, np.array([chances.share]))
        if node.twins is not None:
            by_twins = twin_log_clearing(node.twins, of.leans[TWINS].mean)
            self._clearing = np.column_stack([self._clearing, np.nan_to_num(by_twins)])
        # How much a nonce says on average for this population and against a fraud beside it.
        self.nearness = float(self._clearing.mean(axis=0).min())

    @property
    def distance(self) -> float:
        """How far the node's figures are from the population's on average."""
        sizes = abs(float(np.log(np.median(self._node.ratios) / np.median(self._of.ratios))))
        if self._node.twins is None:
            return sizes
        return sizes + abs(float(self._node.twins.mean()) - self._of.leans[TWINS].mean)

    def paired(self, drawn: Draws) -> Counts:
        if ("paired", drawn) not in self._found:
            self._found["paired", drawn] = first_passages(self._sizes, drawn, self._limit)
        return self._found["paired", drawn]

    def direction(self, drawn: Draws) -> Counts:
        if ("direction", drawn) not in self._found:
            limit = self._limit + math.log(max(1, len(self._node.leans)))
            self._found["direction", drawn] = first_of(self._leans, drawn, limit)
        return self._found["direction", drawn]

    def convicted(self, drawn: Draws) -> Counts:
        return np.minimum(self.paired(drawn), self.direction(drawn))

    def refuted(self, drawn: Draws) -> Counts:
        """When the population is refuted, by what convicts or by less."""
        reached = [self._of.refuting.log_factors(self._node.ratios)]
        if self._node.twins is not None:
            reached.append(self._of.leans[TWINS].log_factors(self._node.twins))
        return first_of(reached, drawn, self._limit, self.convicted(drawn))

    def cleared(self, drawn: Draws, ruled_out: Counts, until: Counts) -> Counts:
        """When all tests clear at once, if that is by ``until`` and before one refutes this."""
        needed, from_nonce = self._chances.clears_at, ruled_out[:, np.newaxis]
        found = np.full(len(drawn.rows), drawn.never)
        for column in self._clearing.T:
            if _bound(column[:, np.newaxis], drawn, needed) * len(found) < NEGLIGIBLE:
                return found

        def is_clear(paths: Floats, running: Counts, numbers: Counts) -> NDArray[np.bool_]:
            every: NDArray[np.bool_] = paths.min(axis=-1) >= needed
            return every & (numbers >= from_nonce[running])

        # A run in which a suspect stays is not followed.
        until = np.where(ruled_out <= until, until, 0)
        stops = _first(self._clearing, drawn, is_clear, until)
        clear = np.flatnonzero(stops < drawn.never)
        before = self.refuted(drawn.of(clear)) > stops[clear]
        found[clear[before]] = stops[clear[before]]
        return found

    @cached_property
    def _sizes(self) -> Floats:
        return self._of.convicting.log_factors(self._node.ratios)

    @cached_property
    def _leans(self) -> list[Floats]:
        known = ((self._of.lean(name), figures) for name, figures in self._node.leans.items())
        return [lean.log_factors(figures) for lean, figures in known if lean is not None]


def _closest_first(node: NodeFigures, honest: HonestPopulations, chances: Chances) -> list[_Member]:
    members = [_Member(member, node, chances) for member in honest.members]
    return sorted(members, key=lambda member: -member.nearness)


def _by_all(
    members: Sequence[_Member], drawn: Draws, ended: Callable[[_Member, Draws], Counts]
) -> Counts:
    """When a run has ``ended`` by each of ``members``, whose first ones end the fewest runs."""
    stops, still = np.zeros(len(drawn.rows), dtype=np.int64), np.arange(len(drawn.rows))
    for member in members:
        stops[still] = np.maximum(stops[still], ended(member, drawn.of(still)))
        still = still[stops[still] < drawn.never]
    return stops


def ruled_out(
    leans: Mapping[str, Floats], guilty: Mapping[str, Expected], chances: Chances, drawn: Draws
) -> Counts:
    """When every suspect is ruled out, by what its prover would show."""
    last = np.zeros(len(drawn.rows), dtype=np.int64)
    for name, figures in leans.items():
        mean, sd = guilty[name].mean, guilty[name].sd
        innocence = (mean**2 / 2 - mean * figures) / sd**2
        last = np.maximum(last, first_passages(innocence[:, np.newaxis], drawn, chances.clears_at))
    return last


def first_of(
    each: Sequence[Floats], drawn: Draws, limit: float, until: Counts | None = None
) -> Counts:
    """The first passages of any of several kinds of evidence, [n, bets] each: int64 [runs].

    Runs are followed up to ``until``, at which they have ended anyhow.
    """
    stops = np.full(len(drawn.rows), drawn.never) if until is None else until
    # The strongest first, since a run need not be followed beyond the end it has found.
    for factors in sorted(each, key=lambda factors: -float(np.nan_to_num(factors).mean(0).max())):
        stops = np.minimum(stops, first_passages(factors, drawn, limit, stops))
    return stops


def first_passages(
    factors: Floats, drawn: Draws, limit: float, until: Counts | None = None
) -> Counts:
    """The nonces after which each run's evidence is at least ``limit``: int64 [runs].

    ``factors`` [n, bets] are logarithms; NaN, of a claim without a vector, gives nothing. Where no
    nonces of the run up to ``until`` are enough it is ``drawn.never``.
    """
    known = np.nan_to_num(factors)
    if _bound(known, drawn, limit) * len(drawn.rows) < NEGLIGIBLE:
        return np.full(len(drawn.rows), drawn.never)
    return _first(known, drawn, lambda paths, *_: _reached(paths, limit), until)


# Whether runs have ended: of their sums [runs, step, columns], the numbers of the runs and of the
# nonces in the step, bool [runs, step].
Ended = Callable[[Floats, Counts, Counts], NDArray[np.bool_]]


def _first(factors: Floats, drawn: Draws, ended: Ended, until: Counts | None = None) -> Counts:
    """When the sums of ``factors`` [n, columns] along each run have first ``ended``."""
    runs, most = drawn.rows.shape
    stops = np.full(runs, drawn.never)
    followed = np.arange(runs) if until is None else np.flatnonzero(until > 0)
    for together in np.split(followed, range(AT_ONCE, len(followed), AT_ONCE)):
        running, start, sums = together, 0, np.zeros((len(together), factors.shape[1]))
        while start < most and len(running):
            paths = factors[drawn.rows[running, start : start + (STEP if start else FIRST_STEP)]]
            paths[:, 0] += sums
            np.cumsum(paths, axis=1, out=paths)
            over = ended(paths, running, np.arange(start + 1, start + 1 + paths.shape[1]))
            found = over.any(axis=1)
            stops[running[found]] = start + 1 + over[found].argmax(axis=1)
            start += paths.shape[1]
            kept = ~found if until is None else ~found & (until[running] > start)
            running, sums = running[kept], paths[kept, -1]
    return stops if until is None else np.where(stops <= until, stops, drawn.never)


def _bound(factors: Floats, drawn: Draws, limit: float) -> float:
    """An upper bound of the chance that a run reaches ``limit``.

    The mean of the bets reaches it only if one bet does. A bet to the power of p, over the mean m
    of that power of one factor for each nonce, is a martingale; so by Ville's inequality it exceeds
    the limit with a chance of at most m^most / limit^p, whatever p.
    """
    powers = _POWERS[:, np.newaxis]
    logs = powers[:, np.newaxis] * factors + np.log(drawn.chances)[:, np.newaxis]
    # scipy's logsumexp takes most of the time of a simulation.
    highest = logs.max(axis=1)
    means = highest + np.log(np.exp(logs - highest[:, np.newaxis]).sum(axis=1))
    bounds = drawn.most * np.maximum(0.0, means) - powers * limit
    return float(np.exp(np.minimum(bounds.min(axis=0), 0.0)).sum())


def _reached(logs: Floats, limit: float) -> NDArray[np.bool_]:
    """Whether the mean of exp(``logs``) along the last axis is at least exp(``limit``)."""
    # The mean is at most the largest, which is quicker to compute.
    highest = logs.max(axis=-1)
    over: NDArray[np.bool_] = highest >= limit
    above = np.exp(logs[over] - highest[over, np.newaxis]).mean(axis=-1)
    over[over] = highest[over] + np.log(above) >= limit
    return over
