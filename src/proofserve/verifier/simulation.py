"""Verifications of resampled nonces: how many end in which verdict, and after how many nonces.

The factors of a test are independent from nonce to nonce, so its evidence along a verification is
the sum of the increments of the nonces drawn. Every suspect is computed for every nonce here, which
gives a verdict more chances to convict than ``verify`` has.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.directions import Compared, Footprint, explained
from proofserve.protocol.verdict.evidence import mixed
from proofserve.protocol.verdict.scale import CONVICTING
from proofserve.verifier.judges import Chances
from proofserve.verifier.populations import LEAST_RATIO, LEAST_REACH, HonestPopulations, RunFigures

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

    ``ratios`` float64 [n] of lengths are infinite without a vector, and ``footprints`` float64 [n]
    then 0. ``suspects`` are comparisons with predictions, on the n nonces each; ``explained`` [n]
    is what honest runs explain.
    """

    ratios: Floats
    footprints: Floats
    suspects: Mapping[str, Compared]
    explained: Floats

    def __len__(self) -> int:
        return len(self.ratios)

    def beside(self, of: Footprint) -> Floats:
        """The figures of ``footprints``, the usual one where errors are too short to have any."""
        pointing = np.where(self.ratios <= LEAST_RATIO, np.nan, self.footprints)
        return of.figures(pointing, self.ratios)


def node_figures(
    node: RunFigures,
    ours: Mapping[str, RunFigures],
    honest: HonestPopulations,
    predicted: Mapping[str, Floats],
    left_out: str = "",
) -> NodeFigures:
    """Of the nonces of ``node`` on which the suspects were measured, all if none were.

    ``ours`` are our runs of the reference of ``honest`` and of others. They may explain errors, but
    for one that is ``left_out``. ``predicted`` are lengths of predictions on their first nonces.
    """
    measured = min((len(values) for values in node.cosines.values()), default=len(node.lengths))
    rows, own = node.rows[:measured], ours[honest.reference]
    ratios = honest.unit.ratios(node.lengths[:measured], own.lengths[rows])
    units = honest.unit.of(own.lengths[rows])
    known = np.where(np.isfinite(ratios), ratios, np.nan)

    def beside(lengths: Floats, cosines: Floats) -> Compared:
        return Compared(known, lengths[rows] / units, cosines[:measured])

    runs = [
        beside(run.lengths, node.footprints[name]) for name, run in ours.items() if name != left_out
    ]
    return NodeFigures(
        ratios,
        np.nan_to_num(node.footprints[honest.reference][:measured]),
        {name: beside(predicted[name], values) for name, values in node.cosines.items()},
        explained(runs, honest.lengths.wider(CONVICTING)),
    )


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
    """Verifications of ``node``, as ``verify`` runs them by default, at ``chances`` in all.

    Every suspect is compared with every nonce. Without populations there is no test of sizes.
    """
    tests = _Tests(node, honest, chances)
    by_test = tests.convicting(drawn)
    convicted = np.minimum(*by_test.values())
    refuted = tests.refuted(drawn, convicted)
    cleared = tests.cleared(drawn)
    return Endings(
        most=drawn.most,
        convicted_at=convicted,
        cleared_at=np.where(cleared < refuted, cleared, drawn.never),
        refuted=refuted <= drawn.most,
        by_test=by_test,
        closest=honest.closest(float(node.footprints.mean())),
    )


def convictions(
    node: NodeFigures, honest: HonestPopulations, chances: Chances, drawn: Draws
) -> Counts:
    """When each run is convicted, int64 [runs], if clearing did not end it before."""
    return np.minimum(*_Tests(node, honest, chances).convicting(drawn).values())


@dataclass(frozen=True, slots=True)
class _Tests:
    """What each nonce of a node gives to every test."""

    node: NodeFigures
    honest: HonestPopulations
    chances: Chances

    @property
    def limit(self) -> float:
        """The logarithm of the evidence with which one test convicts."""
        # Tests that can convict share alpha: sizes and directions.
        return math.log((2 if self.honest.members else 1) / self.chances.alpha)

    def paired(self, drawn: Draws) -> Counts:
        """When the errors are too long for each of the populations, whose nearest comes first."""
        if not self.honest.members:
            return np.full(len(drawn.rows), drawn.never)
        factors = [each.sizes.log_factors(self.node.ratios) for each in self.honest.members]
        stops, still = np.zeros(len(drawn.rows), dtype=np.int64), np.arange(len(drawn.rows))
        for each in sorted(factors, key=lambda of: float(of.mean(axis=0).max())):
            ends = first_passages(each, drawn.of(still), self.limit)
            stops[still] = np.maximum(stops[still], ends)
            # A run that one of them explains needs no other.
            still = still[stops[still] < drawn.never]
        return stops

    def direction(self, drawn: Draws) -> Counts:
        suspects, wide = self.node.suspects.values(), self.honest.lengths.wider(CONVICTING)
        limit = self.limit + math.log(max(1, len(suspects)))
        factors = [each.log_factors(wide, self.node.explained) for each in suspects]
        return first_of(factors, drawn, limit)

    def convicting(self, drawn: Draws) -> Mapping[str, Counts]:
        """When each test alone convicts."""
        return {"paired": self.paired(drawn), "direction": self.direction(drawn)}

    def refuted(self, drawn: Draws, until: Counts) -> Counts:
        """When no footprint is left that the node may have, if that is before ``until``."""
        limit = self.chances.convicts_at
        ends = [
            first_passages(of.log_refuting(self.node.beside(of)), drawn, limit, until)
            for of in self.honest.footprints.values()
        ]
        return np.max(ends, axis=0) if ends else np.full(len(drawn.rows), drawn.never)

    def cleared(self, drawn: Draws) -> Counts:
        """When a footprint and the innocence of every suspect are shown at once."""
        share, needed = self.chances.share, self.chances.clears_at
        seen = [
            -mixed(each.log_ratio(self.honest.lengths), share)
            for each in self.node.suspects.values()
            if np.median(each.predicted) >= LEAST_REACH
        ]
        found = np.full(len(drawn.rows), drawn.never)
        for of in self.honest.footprints.values():
            kept = of.log_clearing(self.node.beside(of), share, self.chances.kept)
            columns = np.column_stack([kept, *seen])
            chances = [_bound(column[:, np.newaxis], drawn, needed) for column in columns.T]
            if min(chances) * len(found) >= NEGLIGIBLE:
                clear = _first(columns, drawn, lambda paths: paths.min(axis=-1) >= needed)
                found = np.minimum(found, clear)
        return found


def first_of(each: Sequence[Floats], drawn: Draws, limit: float) -> Counts:
    """The first passages of any of several kinds of evidence, [n, bets] each: int64 [runs]."""
    stops = np.full(len(drawn.rows), drawn.never)
    # The strongest first, since a run need not be followed beyond the end it has found.
    for factors in sorted(each, key=lambda factors: -float(factors.mean(0).max())):
        stops = np.minimum(stops, first_passages(factors, drawn, limit, stops))
    return stops


def first_passages(
    factors: Floats, drawn: Draws, limit: float, until: Counts | None = None
) -> Counts:
    """The nonces after which each run's evidence is at least ``limit``: int64 [runs].

    ``factors`` [n, bets] are logarithms. Where no nonces of the run up to ``until`` are enough it
    is ``drawn.never``.
    """
    if _bound(factors, drawn, limit) * len(drawn.rows) < NEGLIGIBLE:
        return np.full(len(drawn.rows), drawn.never)
    return _first(factors, drawn, lambda paths: _reached(paths, limit), until)


# Whether runs have ended: of their sums [runs, step, columns] bool [runs, step].
Ended = Callable[[Floats], NDArray[np.bool_]]


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
            over = ended(paths)
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
    # A nonce of no chance has the logarithm minus infinity, and adds nothing.
    with np.errstate(divide="ignore"):
        chances = np.log(drawn.chances)
    logs = powers[:, np.newaxis] * factors + chances[:, np.newaxis]
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
