"""What honest means: kernels that may serve the model, beside our own run of one of them.

A node is convicted only if its errors are like those of none of these kernels. It is cleared only
by a kernel whose footprint its errors have: that of our own run, as we emulate it, or of a node
that was measured.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.footprint import Footprint, emulated_footprint, footprint
from proofserve.protocol.verdict.scale import CONVICTING, ScaleFit, SizeBets, fitted
from proofserve.protocol.verdict.suspicion import Reach, reach

Floats = NDArray[np.float64]
# Ratios to our errors below this count as this. A kernel in float32 errs a million times less than
# ours, except where a rounding of the wire flips: beside such figures no error would be large.
LEAST_RATIO: Final = 0.1
# Fewer honest nonces bound no spread.
LEAST_FIGURES: Final = 8
# A kernel whose errors are so many times as long as ours clears no node: what it rounds away, as a
# cache in fp8 does, may be alike in all kernels, and then other weights keep its footprint.
HIDES: Final = 1.5
# A suspect that moves results by less than this much of an honest error cannot be told from it.
LEAST_REACH: Final = 0.5
# Errors of honest kernels without a calibration, in the unit of our own run's of the same nonce.
# Of 20 emulated kernels on three trained models the largest are 1.5 times ours; ``nu1`` and ``nu2``
# say that they point anywhere in 24 dimensions, while those of 128 values had 40 to 120.
DIMENSIONS: Final = 24.0
WIDEST: Final = 1.5


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
        made: Floats = own**self.size * self.typical ** (1.0 - self.size)
        return made

    def ratios(self, lengths: Floats, own: Floats) -> Floats:
        """The figures of sizes: ``lengths`` [n] in this unit, ``own`` [n] of the same nonces."""
        ratios: Floats = np.maximum(lengths / self.of(own), LEAST_RATIO)
        return ratios


@dataclass(frozen=True, slots=True)
class Population:
    """The lengths of one honest kernel's errors: ``ratios`` float64 [n] in the unit."""

    name: str
    ratios: Floats
    sizes: SizeBets


def measured_here(name: str, ratios: Floats) -> Population:
    """The lengths [n] of a trusted node in the nonces so far, where there is no calibration.

    They are taken to be as long as those of the widest kernel that is emulated, at least.
    """
    wide = ratios * max(1.0, WIDEST / float(np.median(ratios)))
    return Population(name, wide, SizeBets(fitted(wide), wide, CONVICTING))


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

    def expecting(self, twins: Sequence[float], width: int) -> "HonestPopulations":
        """The same, for a run of the reference in two orders (``emulated_footprint``)."""
        expected = {self.reference: emulated_footprint(width, twins)}
        return replace(self, footprints={**self.footprints, **expected})

    def on_ranks(self, reference: str, width: int) -> "HonestPopulations":
        """The same beside our run on several ranks, ``reference``, whose own footprint clears."""
        return replace(self, reference=reference, footprints={reference: emulated_footprint(width)})

    def of_node(self, reference: str, width: int) -> "HonestPopulations":
        """The same beside a trusted node, whose errors may be longer than any that was measured."""
        return replace(self.on_ranks(reference, width), unit=Unit(), reaches={})

    def without(self, name: str) -> "HonestPopulations":
        """The same, with one of the members left out."""
        return replace(
            self,
            members=tuple(member for member in self.members if member.name != name),
            footprints={each: of for each, of in self.footprints.items() if each != name},
        )


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

    members = []
    for name, run in others.items():
        logs = np.log(unit.ratios(run.lengths, own.lengths[run.rows]))
        ratios = np.exp(independent(logs, run))
        bets = SizeBets(fitted(ratios), ratios, CONVICTING * room)
        members.append(Population(name, ratios, bets))
    short = {each.name for each in members if float(np.median(each.ratios)) <= HIDES}
    kept = {
        name: footprint(independent(run.footprints[reference], run))
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
        ours = own.lengths[run.rows]
        logs = np.log(ours)
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
    largest = float(sizes.max())
    factor = math.sqrt(max(1.0, 1.0 + (largest - 1.0) * correlation))
    made: Floats = overall + factor * (values - overall)
    return made
