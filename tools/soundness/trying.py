"""Tries honest nodes and cheats on one model: simulated verifications of the nonces computed."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from measuring.nodes import about_calibration
from measuring.results import machine_text
from proofserve.models.trained import TRAINED_MODELS
from proofserve.protocol.verdict.directions import cosine, emulated_footprint, levelled
from proofserve.reports import Progress
from proofserve.verifier.calibration_file import CalibrationFile
from proofserve.verifier.judges import BankRun, Chances, Vectors
from proofserve.verifier.noise import (
    VERIFICATIONS,
    MeasuringPlan,
    RunMeasurement,
    checked,
    measured_calibration,
)
from proofserve.verifier.populations import (
    HonestPopulations,
    RunFigures,
    lacks_footprint,
    nearest,
    uncalibrated,
)
from proofserve.verifier.simulation import Endings, draws, node_figures, simulated
from proofserve_lab.checkpoints import trained_calibration
from soundness.results import CALIBRATED, LEFT_OUT, UNCALIBRATED, Cell, Cheat, Found, HonestNode
from soundness.runs import KeptRuns

POWER: Final = 0.999
# Of the nonces that a cheat forges; a verdict excludes each in turn.
SHARES: Final = (1.0, 0.7, 0.5, 0.3, 0.1)
# In which a validator's own run adds up, as those of ``verify``; emulated nodes add up as this
# machine does.
_ORDERS: Final = (1, 2)
# Nonces by which a kernel on several ranks is chosen.
_TRIED_ON: Final = 4

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trial:
    """``runs`` verifications of up to ``most`` nonces, and those of cheats, which end late.

    An honest node shall be cleared within ``soon`` of them.
    """

    runs: int = 10_000
    most: int = 200
    soon: int = 100
    runs_of_cheats: int = 2000
    most_of_cheats: int = 1000


@dataclass(frozen=True, slots=True)
class RealNode:
    """Vectors of an honest node, by its name, and the processor that it ran on."""

    name: str
    processor: str
    vectors: Vectors


def calibration_of(
    runs: KeptRuns, progress: Progress, verifications: int = VERIFICATIONS
) -> CalibrationFile:
    """The one that the package ships, or as ``calibrate noise`` makes it without any real node."""
    subject, work = runs.subject, runs.work
    trained = TRAINED_MODELS.get(subject.arch)
    if trained and work.scheme.name in trained.calibrated:
        with trained_calibration(work.scheme.name, trained) as file:
            return CalibrationFile.read(file)
    nonces = subject.calibrated
    plan = MeasuringPlan(nonces, len(nonces), subject.bank)
    made = measured_calibration(runs, [], plan, about_calibration(subject.arch, work), progress)
    return checked(made, progress, verifications)


class OwnRuns:
    """A validator's own runs of some kernels, each in two orders, as nodes are judged beside them.

    ``one`` and ``again`` are their errors by kernel, ``predicted`` those of suspects.
    """

    def __init__(
        self,
        judged: Sequence[int],
        one: Mapping[str, Vectors],
        again: Mapping[str, Vectors],
        predicted: Mapping[str, Vectors],
    ) -> None:
        self._judged = judged
        self._runs = one, again
        self.measuring = RunMeasurement(judged, one, predicted)
        self._again = RunMeasurement(judged, again, {})

    def figures(self, errors: Vectors) -> RunFigures:
        """Footprints are means of the cosines with both runs, as if these were alike as usual."""
        shown = {nonce: errors[nonce] for nonce in self._judged if nonce in errors}
        found, again = (of.fields(shown).figures for of in (self.measuring, self._again))

        def levelled_of(name: str, figures: Floats) -> Floats:
            between = np.array(self.between_orders(name))
            both = (figures + again.footprints[name]) / 2
            return levelled(both, between[found.rows], float(between.mean()))

        of_both = {name: levelled_of(name, of) for name, of in found.footprints.items()}
        return replace(found, footprints=of_both)

    @property
    def every(self) -> Mapping[str, RunFigures]:
        return {name: self.figures(errors) for name, errors in self._runs[0].items()}

    def between_orders(self, name: str) -> list[float]:
        one, again = (of[name] for of in self._runs)
        return [cosine(one[nonce], again[nonce]) for nonce in self._judged]

    def nearest(self, errors: Vectors) -> tuple[str, bool]:
        """The kernel that is most like a node, and whether the node has its footprint."""
        shown = self.figures(errors)
        name = nearest(shown, [*self._runs[0]])
        kept = shown.footprints[name]
        expected = emulated_footprint(len(next(iter(errors.values()))), self.between_orders(name))
        return name, not lacks_footprint(float(kept.mean()), len(kept), expected)


class Trying:
    """One model and scheme, by vectors that ``runs`` has or computes when this is made."""

    def __init__(
        self, runs: KeptRuns, calibration: CalibrationFile, trial: Trial, progress: Progress
    ) -> None:
        self._runs = runs
        self._calibration = calibration
        self._trial = trial
        self._chances = Chances().of_vectors(runs.work.scheme.width)
        self._progress = progress
        self._judged = judged = runs.subject.judged
        suspects = runs.names if runs.subject.serves_bank else ()
        self._cheats = (*suspects, *runs.subject.cheats)
        text = f"{len(runs.names)} suspects"
        predicted = {n: runs.predictions(n, judged) for n in progress.over(text, runs.names)}
        text = f"{len(runs.kernels)} emulated kernels"
        nodes = {
            kernel: runs.errors(BankRun(kernels=kernel), judged)
            for kernel in progress.over(text, runs.kernels)
        }
        self._predicted = predicted
        self._nodes = nodes
        progress.step(f"{len(runs.references)} of them in two other orders")
        self._ours = self._in_orders(runs.references, judged)

    def found(self, real: Sequence[RealNode]) -> Found:
        """Every emulated kernel, ``real`` nodes of the same nonces, and the cheats."""
        runs, trial = self._runs, self._trial
        self._progress.step("verifying honest nodes", len(self._nodes) + len(real))
        honest = [self._honest_node(name, None, each) for name, each in self._nodes.items()]
        shown = [runs.errors_of(each.vectors) for each in real]
        for each, errors in zip(real, shown, strict=True):
            honest.append(self._honest_node(each.name, each.processor, errors))
        # What a cheat computes honestly, a real server of its kind would.
        beside = self._ours.figures(shown[0] if shown else self._nodes[self._served])
        self._progress.step("verifying cheats", len(self._cheats) * len(SHARES))
        return Found(
            arch=runs.subject.arch,
            scheme=runs.work.scheme.name,
            date=time.strftime("%Y-%m-%d"),
            machine=machine_text(),
            runs=trial.runs,
            runs_of_cheats=trial.runs_of_cheats,
            honest=tuple(honest),
            cheats=tuple(
                self._cheat(name, share, beside) for name in self._cheats for share in SHARES
            ),
        )

    @property
    def _served(self) -> str:
        """The emulated kernel of this kind of server, or the only one."""
        return self._runs.references[min(1, len(self._runs.references) - 1)]

    def _honest_node(self, name: str, processor: str | None, errors: Vectors) -> HonestNode:
        trial, width = self._trial, self._runs.work.scheme.width
        ours, reference = self._judged_beside(errors)
        predicted = ours.measuring.lengths
        # References may explain errors, as in a verdict, also beside a run on several ranks.
        runs = {**self._ours.every, **ours.every}
        of_references, shown = self._ours.figures(errors), ours.figures(errors)
        shown = replace(shown, footprints={**of_references.footprints, **shown.footprints})
        alone = uncalibrated(reference, width).expecting(ours.between_orders(reference), width)
        honest = self._known(ours, reference)
        node = node_figures(shown, runs, honest, predicted)
        drawn = draws(len(node), trial.runs, trial.most)
        with_it = simulated(node, honest, self._chances, drawn)
        # A real node is none of the populations: then the one most like it is left out.
        without = honest.without(name if name in honest.names else with_it.closest)
        apart = node_figures(shown, runs, without, predicted, left_out=name)
        unmeasured = node_figures(shown, runs, alone, predicted)
        cells = {
            CALIBRATED: self._cell(with_it),
            LEFT_OUT: self._cell(simulated(apart, without, self._chances, drawn)),
            UNCALIBRATED: self._cell(simulated(unmeasured, alone, self._chances, drawn)),
        }
        self._progress.advance()
        return HonestNode(name, processor, len(node), float(np.median(node.ratios)), cells)

    def _judged_beside(self, errors: Vectors) -> "tuple[OwnRuns, str]":
        """As ``OwnRun`` chooses it: several ranks where no reference has a footprint."""
        reference, has_it = self._ours.nearest(errors)
        if has_it:
            return self._ours, reference
        every = [name for of in self._runs.variants.values() for name in of.values()]
        first, _ = self._in_orders(every, self._judged[:_TRIED_ON]).nearest(errors)
        several = self._in_orders([first], self._judged)
        on_ranks, has_it = several.nearest(errors)
        return (several, on_ranks) if has_it else (self._ours, reference)

    def _in_orders(self, names: Sequence[str], nonces: Sequence[int]) -> "OwnRuns":
        one, again = (
            {n: self._runs.errors(BankRun(kernels=n, order=order), nonces) for n in names}
            for order in _ORDERS
        )
        return OwnRuns(nonces, one, again, self._predicted)

    def _known(self, ours: "OwnRuns", reference: str) -> HonestPopulations:
        width, known = self._runs.work.scheme.width, self._calibration
        one = next((o for o, of in self._runs.variants.items() if reference in of.values()), None)
        if one in known.references:
            honest = known.honest(one).on_ranks(reference, width)
        elif reference in known.references:
            honest = known.honest(reference)
        else:
            honest = uncalibrated(reference, width)
        return honest.expecting(ours.between_orders(reference), width)

    def _cell(self, ended: Endings) -> Cell:
        cleared, undecided = ended.cleared, ended.undecided
        soon = int(np.count_nonzero(ended.cleared_at <= self._trial.soon))
        if not self._runs.may_clear:
            cleared, soon, undecided = 0, 0, undecided + cleared
        return Cell(ended.convicted, cleared, soon, ended.unexplained, undecided, ended.closest)

    def _cheat(self, name: str, share: float, beside: RunFigures) -> Cheat:
        """Judged beside the reference of the server that computes the other nonces."""
        trial, ours = self._trial, self._ours
        reference = nearest(beside, self._runs.references)
        cheat = ours.figures(self._runs.cheat_errors(BankRun(name, reference), self._judged))
        honest = self._known(ours, reference)
        mixed = _joined(beside, cheat)
        node = node_figures(mixed, ours.every, honest, ours.measuring.lengths)
        counts = len(beside.lengths), len(cheat.lengths)
        chances = np.repeat([(1.0 - share) / counts[0], share / counts[1]], counts)
        drawn = draws(len(node), trial.runs_of_cheats, trial.most_of_cheats, chances)
        ended = simulated(node, honest, replace(self._chances, share=share), drawn)
        self._progress.advance()
        return Cheat(
            weights=name,
            kernel=reference,
            share=share,
            size=float(np.median(node.ratios[counts[0] :])),
            footprint=float(cheat.footprints[reference].mean()),
            convicts_at=(
                ended.nonces_to(ended.convicted_at, 0.5),
                ended.nonces_to(ended.convicted_at, POWER),
            ),
            cleared=ended.cleared if self._runs.may_clear else 0,
        )


def _joined(one: RunFigures, other: RunFigures) -> RunFigures:
    def both(first: Mapping[str, Floats], second: Mapping[str, Floats]) -> dict[str, Floats]:
        return {name: np.concatenate([values, second[name]]) for name, values in first.items()}

    return RunFigures(
        np.concatenate([one.lengths, other.lengths]),
        both(one.footprints, other.footprints),
        both(one.cosines, other.cosines),
        np.concatenate([one.rows, other.rows]),
    )
