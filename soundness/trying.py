"""Tries honest nodes and cheats on one model: simulated verifications of the nonces computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.cli.model import trained_calibration
from proofserve.lab.report import Progress
from proofserve.models.trained import TRAINED_MODELS
from proofserve.protocol.verdict.footprint import cosine
from proofserve.verifier.calibration_file import CalibrationFile, read
from proofserve.verifier.judges import BankRun, Chances, Vectors
from proofserve.verifier.noise import (
    VERIFICATIONS,
    MeasuringPlan,
    RunMeasurement,
    checked,
    measured_calibration,
)
from proofserve.verifier.populations import HonestPopulations, RunFigures, nearest, uncalibrated
from proofserve.verifier.simulation import Endings, draws, node_figures, simulated
from soundness.results import CALIBRATED, LEFT_OUT, UNCALIBRATED, Cell, Cheat, Found, HonestNode
from soundness.runs import KeptRuns

POWER: Final = 0.999
# Of the nonces that a cheat forges; a verdict excludes each in turn.
SHARES: Final = (1.0, 0.7, 0.5, 0.3, 0.1)
# In which a node adds up whose kernel is emulated for our own run, too, and a cheat: no node has
# ours, which are as this machine does and ``_AGAIN``.
_ORDER, _AGAIN = 1, 2

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


def tried(
    runs: KeptRuns,
    calibration: CalibrationFile,
    real: Sequence[RealNode],
    trial: Trial,
    progress: Progress,
) -> Found:
    """Every emulated kernel of ``runs``, ``real`` nodes of the same nonces, and the cheats."""
    return _Trying(runs, calibration, trial, progress).found(real)


def calibration_of(
    runs: KeptRuns, progress: Progress, verifications: int = VERIFICATIONS
) -> CalibrationFile:
    """The one that the package ships, or as ``calibrate noise`` makes it without any real node."""
    subject, work = runs.subject, runs.work
    trained = TRAINED_MODELS.get(subject.arch)
    if trained and work.scheme.name in trained.calibrated:
        with trained_calibration(work.scheme.name, trained) as file:
            return read(file)
    nonces = subject.calibrated
    plan = MeasuringPlan(nonces, len(nonces), subject.bank)
    about = {
        "model": subject.arch,
        "shape": None,
        "kv_dtype": "auto",
        "scheme": work.scheme.name,
        "stronger_rng": False,
        "seq_len": work.seq_len,
        "k_dim": work.scheme.width // work.scheme.sequences_per_nonce,
        "block_hash": work.block.hash,
        "public_key": work.public_key,
    }
    made = measured_calibration(runs, [], plan, about, progress)
    return checked(made, progress, verifications)


class _Trying:
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
        progress.step(f"{len(runs.names)} suspects", len(runs.names))
        predicted = {}
        for name in runs.names:
            predicted[name] = runs.predictions(name, judged)
            progress.advance()
        progress.step(f"{len(runs.kernels)} emulated kernels", len(runs.kernels))
        errors = {}
        for kernel in runs.kernels:
            errors[kernel] = runs.errors(BankRun(kernels=kernel), judged)
            progress.advance()
        references = {name: errors[name] for name in runs.references}
        progress.step(f"{len(references)} of them in other orders", len(references))
        nodes, again = dict(errors), {}
        for kernel in references:
            nodes[kernel] = runs.errors(BankRun(kernels=kernel, order=_ORDER), judged)
            again[kernel] = runs.errors(BankRun(kernels=kernel, order=_AGAIN), judged)
            progress.advance()
        self._measuring = RunMeasurement(judged, references, predicted)
        self._again = RunMeasurement(judged, again, {})
        self._twins = {
            name: [cosine(of[nonce], again[name][nonce]) for nonce in judged]
            for name, of in references.items()
        }
        self._own = {name: self._figures(of) for name, of in references.items()}
        self._nodes = {name: self._figures(of) for name, of in nodes.items()}

    def found(self, real: Sequence[RealNode]) -> Found:
        runs, trial, check = self._runs, self._trial, self._calibration.left_out
        self._progress.step("verifying honest nodes", len(self._nodes) + len(real))
        honest = [self._honest_node(name, None, each) for name, each in self._nodes.items()]
        shown = [self._figures(runs.errors_of(each.vectors)) for each in real]
        for each, figures in zip(real, shown, strict=True):
            honest.append(self._honest_node(each.name, each.processor, figures))
        # What a cheat computes honestly, a real server of its kind would.
        beside = shown[0] if shown else self._nodes[self._served]
        self._progress.step("verifying cheats", len(self._cheats) * len(SHARES))
        room = check.room if check else 1.0
        return Found(
            arch=runs.subject.arch,
            scheme=runs.work.scheme.name,
            seq_len=runs.work.seq_len,
            runs=trial.runs,
            most=trial.most,
            soon=trial.soon,
            runs_of_cheats=trial.runs_of_cheats,
            calibration=f"{self._calibration.origin}, margins times {room:g}",
            honest=tuple(honest),
            cheats=tuple(
                self._cheat(name, share, beside) for name in self._cheats for share in SHARES
            ),
        )

    @property
    def _served(self) -> str:
        """The emulated kernel of this kind of server, or the only one."""
        return self._runs.references[min(1, len(self._runs.references) - 1)]

    def _figures(self, errors: Vectors) -> RunFigures:
        judged = [nonce for nonce in self._judged if nonce in errors]
        shown = {nonce: errors[nonce] for nonce in judged}
        found, again = (of.fields(shown).figures for of in (self._measuring, self._again))
        both = {name: (of + again.footprints[name]) / 2 for name, of in found.footprints.items()}
        return replace(found, footprints=both)

    def _honest_node(self, name: str, processor: str | None, shown: RunFigures) -> HonestNode:
        trial, reference = self._trial, nearest(shown, self._runs.references)
        own, predicted = self._own[reference], self._measuring.lengths
        honest = self._expecting(self._calibration.honest(reference))
        node = node_figures(shown, own, honest, predicted)
        drawn = draws(len(node), trial.runs, trial.most)
        with_it = simulated(node, honest, self._chances, drawn)
        # A real node is none of the populations: then the one most like it is left out.
        without = honest.without(name if name in honest.names else with_it.closest)
        alone = self._expecting(uncalibrated(reference, self._runs.work.scheme.width))
        unmeasured = node_figures(shown, own, alone, predicted)
        cells = {
            CALIBRATED: self._cell(with_it),
            LEFT_OUT: self._cell(simulated(node, without, self._chances, drawn)),
            UNCALIBRATED: self._cell(simulated(unmeasured, alone, self._chances, drawn)),
        }
        self._progress.advance()
        return HonestNode(name, processor, len(node), float(np.median(node.ratios)), cells)

    def _expecting(self, honest: HonestPopulations) -> HonestPopulations:
        """As a validator whose own run is in two orders."""
        width = self._runs.work.scheme.width
        return honest.expecting(self._twins[honest.reference], width)

    def _cell(self, ended: Endings) -> Cell:
        cleared, undecided = ended.cleared, ended.undecided
        soon = int(np.count_nonzero(ended.cleared_at <= self._trial.soon))
        if not self._runs.may_clear:
            cleared, soon, undecided = 0, 0, undecided + cleared
        return Cell(ended.convicted, cleared, soon, ended.unexplained, undecided, ended.closest)

    def _cheat(self, name: str, share: float, beside: RunFigures) -> Cheat:
        """Judged beside the reference of the server that computes the other nonces."""
        trial, reference = self._trial, nearest(beside, self._runs.references)
        errors = self._runs.cheat_errors(BankRun(name, reference, _ORDER), self._judged)
        cheat = self._figures(errors)
        honest = self._expecting(self._calibration.honest(reference))
        mixed = _joined(beside, cheat)
        node = node_figures(mixed, self._own[reference], honest, self._measuring.lengths)
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
