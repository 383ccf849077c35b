"""What honest means: kernels that may serve the model, beside our own run of one of them.

A node is convicted only if its errors are like those of none of these kernels. It is cleared only
by a kernel whose footprint its errors have: that of our own run, as we emulate it, or of a node
that was measured. The node's errors decide which run is our own; a node that we trust may be it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.directions import (
    HIDES,
    Compared,
    Footprint,
    Reach,
    cosine,
    emulated_footprint,
    explained,
    footprint,
    levelled,
    reach,
    shortened,
)
from proofserve.protocol.verdict.scale import CONVICTING, ScaleFit, SizeBets, fitted
from proofserve.verifier.judges import KEPT_IN_ALL, BankRun, KernelBank, Recompute, Vector, Vectors

Floats = NDArray[np.float64]
# Ratios to our errors below this count as this. A server in float32 errs 300 times less than we, by
# the rounding of the wire: such an error has no direction, and beside it all others would be large.
LEAST_RATIO: Final = 0.1
# Fewer honest nonces bound no spread.
LEAST_FIGURES: Final = 8
# A suspect that moves results by less than this much of an honest error cannot be told from it.
LEAST_REACH: Final = 0.5
# Errors of honest kernels without a calibration, in the unit of our own run's of the same nonce.
# Of 20 emulated kernels on three trained models the largest are 1.5 times ours; ``nu1`` and ``nu2``
# say that they point anywhere in 24 dimensions, while those of 128 values had 40 to 120.
DIMENSIONS: Final = 24.0
WIDEST: Final = 1.5
# Nonces after which a node without a footprint may have that of other kernels or of several ranks,
# and of them those on which all of these are tried.
_LOOKED_AT, _TRIED_ON = 9, 3
# With less than so many standard deviations a node of SmolLM2 got another kernel 9 times in 100.
_BEHIND: Final = 2.0


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What one run of the model showed on the nonces of a calibration.

    ``lengths`` float64 [n] are those of its errors, ``footprints`` their cosines [n] with those of
    each reference's run, ``cosines`` with the predictions of each suspect, [m] of the first m
    nonces. ``rows`` int64 [n] are the places of its nonces among those of the references.
    """

    lengths: Floats
    footprints: Mapping[str, Floats]
    cosines: Mapping[str, Floats]
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of the length of an error: our own run's of the nonce to the power of ``size``.

    The rest of the power is from ``typical``, the geometric mean of our own lengths. With many
    values in a vector a long error of ours says that the nonce feels rounding more, and ``size`` is
    nearly 1; with few it says half as much, and all of it would only add our own noise.
    """

    size: float = 1.0
    typical: float = 1.0

    def of(self, own: Floats) -> Floats:
        """The units of nonces with ``own`` lengths [n]."""
        return np.asarray(own**self.size * self.typical ** (1.0 - self.size))

    def ratios(self, lengths: Floats, own: Floats) -> Floats:
        """The figures of sizes: ``lengths`` [n] in this unit, ``own`` [n] of the same nonces."""
        return np.asarray(np.maximum(lengths / self.of(own), LEAST_RATIO))


@dataclass(frozen=True, slots=True)
class Population:
    """The lengths of one honest kernel's errors: ``ratios`` float64 [n] in the unit."""

    name: str
    ratios: Floats
    sizes: SizeBets


@dataclass(frozen=True, slots=True)
class HonestPopulations:
    """The honest kernels beside our own run of ``reference``; empty ``members`` without any known.

    ``footprints`` are of those that may clear a node, by name, ``reaches`` of suspects. ``lengths``
    is the widest honest distribution of lengths, by which suspects convict or are ruled out.
    """

    reference: str
    unit: Unit
    members: Sequence[Population]
    footprints: Mapping[str, Footprint]
    reaches: Mapping[str, Reach]
    lengths: ScaleFit

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    def closest(self, mean: float) -> str:
        """The kernel that keeps as much of our run's footprint as a node with this mean cosine."""
        return min(self.footprints, key=lambda n: abs(self.footprints[n].mean - mean), default="")

    def expecting(self, between_orders: Sequence[float], width: int) -> "HonestPopulations":
        """The same, for a run of the reference in two orders (``emulated_footprint``)."""
        expected = {self.reference: emulated_footprint(width, between_orders)}
        return replace(self, footprints={**self.footprints, **expected})

    def on_ranks(self, reference: str, width: int) -> "HonestPopulations":
        """The same beside our run on several ranks, ``reference``, whose own footprint clears."""
        return replace(self, reference=reference, footprints={reference: emulated_footprint(width)})

    def of_node(self, reference: str, width: int) -> "HonestPopulations":
        """The same beside a trusted node, whose errors may be longer than any that was measured."""
        return replace(self.on_ranks(reference, width), unit=Unit(), reaches={})

    def without(self, name: str) -> "HonestPopulations":
        """The same, with one of the members left out."""
        footprints = {each: of for each, of in self.footprints.items() if each != name}
        members = tuple(member for member in self.members if member.name != name)
        return replace(self, members=members, footprints=footprints)


def uncalibrated(reference: str, width: int) -> HonestPopulations:
    """What honest means where nothing was measured, of vectors of ``width`` values."""
    dimensions = min(DIMENSIONS, width / 2)
    fit = ScaleFit(1.0, dimensions, dimensions)
    return HonestPopulations(reference, Unit(), (), {reference: emulated_footprint(width)}, {}, fit)


@dataclass(frozen=True, slots=True)
class HonestRuns:
    """The ``runs`` of a calibration by name, the references among them.

    ``measured`` names those that real servers gave. ``predicted`` are lengths of suspects'
    predictions, [m] of the first m nonces, ``width`` the values of a vector. ``groups`` int64
    number the nonces that are alike; None if none are.
    """

    runs: Mapping[str, RunFigures]
    measured: Collection[str]
    predicted: Mapping[str, Floats]
    width: int
    groups: NDArray[np.int64] | None = None


def populations(known: HonestRuns, reference: str, room: float = 1.0) -> HonestPopulations:
    """What honest means beside our run of ``reference``, all margins ``room`` times as wide.

    A measured server may clear where no other reference is nearer to it, and its errors are too
    short to hide lies. Raises ProtocolError for too few figures.
    """
    own = known.runs[reference]
    others = {name: run for name, run in known.runs.items() if name != reference}
    unit = _unit(own, others.values())

    def independent(values: Floats, run: RunFigures) -> Floats:
        groups = known.groups
        return values if groups is None else widened(values, groups[run.rows].tolist())

    sizes = {n: unit.ratios(run.lengths, own.lengths[run.rows]) for n, run in others.items()}
    members = []
    for name, run in others.items():
        ratios = np.exp(independent(np.log(sizes[name]), run))
        bets = SizeBets(fitted(ratios), ratios, CONVICTING * room)
        members.append(Population(name, ratios, bets))
    short = {each.name for each in members if float(np.median(each.ratios)) <= HIDES}
    kept = {
        name: footprint(independent(shortened(run.footprints[reference], sizes[name]), run))
        for name, run in others.items()
        if name in short.intersection(known.measured)
        and nearest(run, [*run.footprints]) == reference
    }
    units, anywhere = unit.of(own.lengths), uncalibrated(reference, known.width)
    widest = max([1.0, *(float(np.median(each.ratios)) for each in members)])
    return HonestPopulations(
        reference,
        unit,
        tuple(members),
        {**anywhere.footprints, **{name: of for name, of in kept.items() if of.is_known}},
        {name: reach(of / units[: len(of)]) for name, of in known.predicted.items()},
        anywhere.lengths.wider(widest * room),
    )


def nearest(run: RunFigures, references: Sequence[str]) -> str:
    """The one of ``references`` whose footprint a run has most of."""
    return max(references, key=lambda name: float(run.footprints[name].mean()))


def _unit(own: RunFigures, others: Collection[RunFigures]) -> Unit:
    """The one in which these honest runs differ least."""
    together = apart = 0.0
    for run in others:
        logs = np.log(ours := own.lengths[run.rows])
        centred = logs - logs.mean()
        theirs = np.log(np.maximum(run.lengths, LEAST_RATIO * ours))
        # The slope of the one by the other within kernels leaves the smallest spread.
        together += float(centred @ (theirs - theirs.mean()))
        apart += float(centred @ centred)
    size = min(1.0, max(0.0, together / apart)) if apart > 0.0 else 1.0
    return Unit(size, float(np.exp(np.log(own.lengths).mean())))


def widened(values: Floats, groups: Sequence[int]) -> Floats:
    """``values`` [n] as far from their mean as sums over groups need: float64 [n].

    Tests multiply the evidence of values as if they were independent. A sum of m values of a group
    that correlate by r has 1 + (m - 1) r times the variance of independent ones (L. Kish, Survey
    Sampling, 1965, section 5.4), so each deviation grows by the square root of it. r is that of a
    one-way analysis of variance; values that repel each other stay as they are.
    """
    numbers = np.unique(np.array(groups), return_inverse=True)[1]
    sizes = np.bincount(numbers).astype(np.float64)
    count, of_groups = len(values), len(sizes)
    if of_groups < 2 or count == of_groups or np.ptp(values) == 0.0:
        return values
    means = np.bincount(numbers, weights=values) / sizes
    overall = float(values.mean())
    between = float((sizes * (means - overall) ** 2).sum()) / (of_groups - 1)
    within = float(((values - means[numbers]) ** 2).sum()) / (count - of_groups)
    # The size that unequal groups count for.
    size = (count - float((sizes**2).sum()) / count) / (of_groups - 1)
    correlation = (between - within) / (between + (size - 1.0) * within)
    factor = math.sqrt(max(1.0, 1.0 + (float(sizes.max()) - 1.0) * correlation))
    return np.asarray(overall + factor * (values - overall))


def lacks_footprint(mean: float, nonces: int, expected: Footprint) -> bool:
    """Whether a node with this ``mean`` cosine is never cleared, and not by chance."""
    half = (1.0 + KEPT_IN_ALL) / 2  # of the way to the lie in all nonces that has to be excluded
    return mean < half * expected.mean - _BEHIND * expected.sd / math.sqrt(nonces)


@dataclass(slots=True)
class _Beside:
    """A reference's run in the first order: lengths of its errors, cosines with the node's.

    ``figures`` are means of the node's cosines with the run in every order, ``between_orders``
    cosines of the runs in two; a reference that never led has none. All are by nonce, NaN where the
    node's error is too short.
    """

    lengths: dict[int, float] = field(default_factory=dict)
    cosines: dict[int, float] = field(default_factory=dict)
    figures: dict[int, float] = field(default_factory=dict)
    between_orders: dict[int, float] = field(default_factory=dict)

    @property
    def likeness(self) -> float:
        known = [each for each in self.cosines.values() if not math.isnan(each)]
        return float(np.mean(known or 1.0))


class OwnRun:
    """The validator's own honest run, beside which all tests judge a node.

    Its ``reference`` is the one of ``references`` whose errors are most like the node's so far;
    those that are too far behind are computed no more. Where none has a footprint, ``trusted``
    nodes take its place, of whose errors there is a function each; then ``others`` are tried.
    ``null`` says what honest means beside it. It adds up in one or two ``orders`` that no node knew
    when it published, or a liar could have exactly our errors where it does not lie.
    """

    def __init__(
        self,
        bank: KernelBank,
        null: Callable[[str], HonestPopulations],
        references: Sequence[str],
        orders: Sequence[int | None] = (None,),
        others: Sequence[str] = (),
        trusted: Mapping[str, Recompute] | None = None,
    ) -> None:
        self._bank = bank
        self._orders = orders
        self._others = others
        self._null = null
        self._beside = {name: _Beside() for name in references}
        self._errors_of = trusted or {}
        self._trusted = {name: _Beside() for name in self._errors_of}
        self._theirs: dict[int, Vector] = {}
        self._honest: HonestPopulations | None = None
        self._measured: Sequence[Population] = ()
        self._short = 0.0 if bank.round_activations else LEAST_RATIO
        self.reference = references[0]

    @property
    def honest(self) -> HonestPopulations:
        """Raises ReportedError as ``null``."""
        if self._honest is None:
            found, of = self._null(self.reference), self._beside[self.reference].between_orders
            width = min(map(len, self._theirs.values()), default=0)
            self._honest = found.expecting([*of.values()], width) if of else found
        return self._honest

    @property
    def members(self) -> Sequence[Population]:
        """The kernels whose lengths convict: of a calibration, else those of trusted nodes."""
        return self.honest.members or self._measured

    def expect(self, nonces: Sequence[int]) -> None:
        runs = [(name, self._orders[0]) for name in self._beside]
        if self._theirs or len(self._beside) == 1:
            # Only the reference that leads is run in every order.
            runs += [(self.reference, order) for order in self._orders]
        self._expect(runs, nonces)

    def _expect(self, runs: Iterable[tuple[str, int | None]], nonces: Sequence[int]) -> None:
        emulated = [BankRun(kernels=n, order=o) for n, o in runs if n not in self._trusted]
        self._bank.expect(dict.fromkeys(emulated, nonces))

    def _errors(self, name: str, nonces: Sequence[int], order: int | None = None) -> Vectors:
        """Of a trusted node, or of our run in the first order unless it is said."""
        if name in self._trusted:
            return self._errors_of[name](nonces)
        order = self._orders[0] if order is None else order
        return self._bank.errors(BankRun(kernels=name, order=order), nonces)

    def compare(self, theirs: Sequence[ClaimError]) -> None:
        """Compute ours of the nonces of ``theirs`` that have a vector. Raises EngineFault."""
        known = self._theirs
        new = {e.nonce: e.error for e in theirs if e.error is not None and e.nonce not in known}
        if not new:
            return
        if len(known) >= _LOOKED_AT and self._lacks(self._beside[self.reference]):
            self._look_at_others()
        self._theirs |= new
        for name, of in {**self._trusted, **self._beside}.items():
            self._see(name, of, tuple(new))
        likeness = {name: of.likeness for name, of in self._beside.items()}
        self.reference = max(likeness, key=likeness.__getitem__)
        # By chance a cosine of v values has a variance of 1 / v, a difference of two twice that.
        values = sum(map(len, self._theirs.values()))
        least = likeness[self.reference] - _BEHIND * math.sqrt(2.0 / values)
        self._beside = {name: of for name, of in self._beside.items() if likeness[name] >= least}
        self._compare_in_every_order()
        self._honest = None
        self._measured = measured = list[Population]()
        for name, of in self._trusted.items():
            if name != self.reference and len(of.lengths) >= LEAST_FIGURES:
                ratios = self.ratios([*of.lengths], [*of.lengths.values()])
                # In the nonces so far, at least as wide as any emulated kernel.
                wide = ratios * max(1.0, WIDEST / float(np.median(ratios)))
                measured.append(Population(name, wide, SizeBets(fitted(wide), wide, CONVICTING)))

    def _see(self, name: str, of: _Beside, nonces: Sequence[int]) -> None:
        for nonce, ours in self._errors(name, nonces).items():
            of.lengths[nonce] = length = float(np.linalg.norm(ours))
            is_short = np.linalg.norm(theirs := self._theirs[nonce]) <= self._short * length
            of.cosines[nonce] = math.nan if is_short else cosine(theirs, ours)

    def _lacks(self, of: _Beside) -> bool:
        return lacks_footprint(of.likeness, len(of.cosines), self.honest.footprints[self.reference])

    def _look_at_others(self) -> None:
        """Add trusted nodes whose footprint the node has, and that hide no lies; else others.

        All of these are tried, on a few nonces first: beside too few ranks no kernel is nearest.
        """
        ours = self._beside[self.reference].lengths
        trusted = {
            name: of
            for name, of in self._trusted.items()
            if not self._lacks(of)
            and float(np.median([of.lengths[n] / ours[n] for n in ours])) <= HIDES
        }
        if trusted:
            self._beside |= trusted
            return
        others, self._others = self._others, ()
        nonces = tuple(self._theirs)
        parts = nonces[:_TRIED_ON], nonces[_TRIED_ON:]
        self._expect([(name, self._orders[0]) for name in others], parts[0])
        for name in others:
            self._beside[name] = _Beside()
            for some in parts:
                self._see(name, self._beside[name], some)
                if self._lacks(self._beside[name]):
                    del self._beside[name]
                    break

    def _compare_in_every_order(self) -> None:
        """Of the nonces that lack it: all, where another reference leads than before."""
        of, theirs = self._beside[self.reference], self._theirs
        lacking = tuple(nonce for nonce in of.cosines if nonce not in of.figures)
        orders = self._orders[:1] if self.reference in self._trusted else self._orders
        first, *others = (self._errors(self.reference, lacking, order) for order in orders)
        for nonce in lacking:
            again = [cosine(theirs[nonce], other[nonce]) for other in others]
            of.figures[nonce] = float(np.mean([of.cosines[nonce], *again]))
            for other in others:
                of.between_orders[nonce] = cosine(first[nonce], other[nonce])

    def cosines(self, nonces: Sequence[int]) -> Floats:
        """Of the node's errors with ours [n]: 0 without a vector, NaN for those too short."""
        of = self._beside[self.reference]
        figures = np.array([of.figures.get(nonce, 0.0) for nonce in nonces])
        usual = float(np.mean([*of.between_orders.values()] or 0.0))
        between = np.array([of.between_orders.get(nonce, usual) for nonce in nonces])
        return levelled(figures, between, usual)

    def compared(self, nonces: Sequence[int], others: Vectors) -> Compared:
        """The node's errors of n ``nonces`` beside ``others``, in the honest unit."""
        ratios, predicted = (
            self.ratios(nonces, [float(np.linalg.norm(of[nonce])) for nonce in nonces])
            for of in (self._theirs, others)
        )
        cosines = np.array([cosine(self._theirs[nonce], others[nonce]) for nonce in nonces])
        return Compared(ratios, predicted, cosines)

    def explained(self, nonces: Sequence[int], fit: ScaleFit) -> Mapping[int, float]:
        """What references (or, uncalibrated, all kernels) and trusted nodes explain, by nonce.

        Raises EngineFault.
        """
        known = self._bank.references if self.honest.members else self._bank.kernels
        names = sorted({*known, *self._trusted, self.reference})
        self._expect([(name, self._orders[0]) for name in names], nonces)
        beside = [self.compared(nonces, self._errors(name, nonces)) for name in names]
        return dict(zip(nonces, explained(beside, fit).tolist(), strict=True))

    def ratios(
        self, nonces: Sequence[int], lengths: Sequence[float], *, trusted: bool = False
    ) -> Floats:
        """``lengths`` [n] of n ``nonces`` that were compared, in the honest unit.

        If ``trusted``, an honest error may be as long as that of any trusted node. Infinite
        lengths, of claims without a vector, need no such nonce.
        """
        every = [self._beside[self.reference], *(self._trusted.values() if trusted else ())]
        own = [max(of.lengths.get(nonce, 1.0) for of in every) for nonce in nonces]
        return self.honest.unit.ratios(np.array(lengths), np.array(own))
