"""Tries honest nodes and cheats on one model: simulated verifications of the nonces computed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.cli.model import trained_calibration
from proofserve.lab.report import Progress
from proofserve.models.trained import TRAINED_MODELS
from proofserve.protocol.sketch import TWINS
from proofserve.protocol.verdict.leaning import LEAST_SD
from proofserve.verifier.calibration_file import CalibrationFile, read
from proofserve.verifier.judges import ALPHA, OWN, BankRun, Chances, Vectors, default_share
from proofserve.verifier.noise import (
    VERIFICATIONS,
    MeasuringPlan,
    checked,
    figure_fields,
    measured_calibration,
)
from proofserve.verifier.populations import RunFigures
from proofserve.verifier.simulation import Endings, draws, node_figures, simulated
from soundness.results import CALIBRATED, LEFT_OUT, UNCALIBRATED, Cell, Cheat, Found, HonestNode
from soundness.runs import KeptRuns
from soundness.uncalibrated import simulated_uncalibrated

POWER: Final = 0.999

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trial:
    """``runs`` verifications of up to ``most`` nonces, and those of cheats, which end late."""

    runs: int = 10_000
    most: int = 200
    runs_of_cheats: int = 2000
    most_of_cheats: int = 1000

    @property
    def chances(self) -> Chances:
        return Chances(share=default_share(self.most))


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
    twins = work.scheme.sequences_per_nonce == TWINS
    plan = MeasuringPlan(nonces, len(nonces), subject.bank, twins)
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
        self._honest = calibration.honest
        self._trial = trial
        self._progress = progress
        self._twins = runs.work.scheme.sequences_per_nonce == TWINS
        self._judged = runs.subject.judged
        self._predicted = {}
        progress.step(f"{len(runs.names)} suspects", len(runs.names))
        for name in runs.names:
            self._predicted[name] = runs.predictions(name, self._judged)
            progress.advance()
        self._own = self._figures(runs.errors(OWN, self._judged))
        self._kernels: dict[str, RunFigures] = {}
        progress.step(f"{len(runs.kernels)} emulated kernels", len(runs.kernels))
        for kernel in runs.kernels:
            self._kernels[kernel] = self._figures(
                runs.errors(BankRun(kernels=kernel), self._judged)
            )
            progress.advance()

    def found(self, real: Sequence[RealNode]) -> Found:
        runs, trial, check = self._runs, self._trial, self._calibration.left_out
        self._progress.step("verifying honest nodes", len(self._kernels) + len(real))
        honest = [self._honest_node(name, None, each) for name, each in self._kernels.items()]
        for each in real:
            shown = self._figures(runs.errors_of(each.vectors))
            honest.append(self._honest_node(each.name, each.processor, shown))
        kernels, cheats = [None, self._other_kernel()], runs.subject.cheats
        self._progress.step("verifying cheats", len(cheats) * len(kernels))
        room = check.room if check else 1.0
        return Found(
            arch=runs.subject.arch,
            scheme=runs.work.scheme.name,
            seq_len=runs.work.seq_len,
            runs=trial.runs,
            most=trial.most,
            runs_of_cheats=trial.runs_of_cheats,
            calibration=f"{self._calibration.origin}, margins times {room:g}",
            honest=tuple(honest),
            cheats=tuple(self._cheat(name, kernel) for name in cheats for kernel in kernels),
        )

    def _figures(self, errors: Vectors) -> RunFigures:
        place = {nonce: row for row, nonce in enumerate(self._judged)}
        judged = [nonce for nonce in self._judged if nonce in errors]
        kept = {nonce: errors[nonce] for nonce in judged}
        return figure_fields(kept, self._predicted, judged, self._twins, place).figures

    def _honest_node(self, name: str, processor: str | None, shown: RunFigures) -> HonestNode:
        trial, chances, honest = self._trial, self._trial.chances, self._honest
        node = node_figures(shown, self._own, honest)
        drawn = draws(len(node), trial.runs, trial.most)
        with_it = simulated(node, honest, chances, drawn)
        # A real node is none of the populations: then the one most like it is left out.
        without = honest.without(name if name in honest.names else with_it.closest)
        others = [_rows(each, shown) for kernel, each in self._kernels.items() if kernel != name]
        own = _rows(self._own, shown)
        cells = {
            CALIBRATED: _cell(with_it),
            LEFT_OUT: _cell(simulated(node, without, chances, drawn)),
            UNCALIBRATED: _cell(simulated_uncalibrated(shown, own, others, chances, drawn)),
        }
        self._progress.advance()
        return HonestNode(name, processor, len(node), float(np.median(node.ratios)), cells)

    def _other_kernel(self) -> str:
        """An emulated kernel in the dtype that is served, which is not that of our own run."""
        runs = self._runs
        served = (k for k in runs.kernels if runs.kernel_facts(k).dtype == runs.served_dtype)
        return next(served)

    def _cheat(self, name: str, kernel: str | None) -> Cheat:
        trial, honest = self._trial, self._honest
        shown = self._figures(self._runs.cheat_errors(name, kernel, self._judged))
        node = node_figures(shown, self._own, honest)
        drawn = draws(len(node), trial.runs_of_cheats, trial.most_of_cheats)
        ended = simulated(node, honest, trial.chances, drawn)
        cosines = shown.cosines.get(name)
        self._progress.advance()
        return Cheat(
            weights=name,
            kernel=kernel or "ours",
            size=float(np.median(node.ratios)),
            cosine=None if cosines is None else float(cosines.mean()),
            convicts_at=(
                ended.nonces_to(ended.convicted_at, 0.5),
                ended.nonces_to(ended.convicted_at, POWER),
            ),
            cleared=ended.cleared,
            open=ended.unexplained + ended.undecided,
            ideal=self._ideal(shown, name),
        )

    def _ideal(self, shown: RunFigures, suspect: str) -> float:
        """The nonces that the best test of these figures needs on average to convict.

        It knows the cheat, and the honest kernel that is most like it, both as normal: each nonce
        then adds their divergence (S. Kullback, Information Theory and Statistics, 1959, chapter
        9) to a likelihood ratio that convicts at 1/alpha.
        """
        of_cheat = self._spread(shown, suspect)
        least = min(_divergence(of_cheat, self._spread(k, suspect)) for k in self._kernels.values())
        return math.log(1.0 / ALPHA) / least

    def _spread(self, shown: RunFigures, suspect: str) -> Floats:
        """The figures of each nonce that the tests read, beside our own: [n, 2 or 3].

        The lean is to the suspect, or to the bank on average where the weights are private.
        """
        columns = [np.log(self._honest.shares.ratios(shown.lengths, self._own.lengths))]
        if shown.alike is not None and self._own.alike is not None:
            columns.append(shown.alike - self._own.alike)
        near = [suspect] if suspect in shown.cosines else [*shown.cosines]
        leans = [shown.cosines[name] - self._own.cosines[name] for name in near]
        return np.stack([*columns, np.mean(leans, axis=0)], axis=1)


def _rows(run: RunFigures, of: RunFigures) -> RunFigures:
    """``run`` on the nonces of ``of`` alone."""
    cosines = {name: values[of.rows] for name, values in run.cosines.items()}
    alike = None if run.alike is None else run.alike[of.rows]
    return RunFigures(run.lengths[of.rows], alike, cosines, of.rows)


def _cell(ended: Endings) -> Cell:
    return Cell(ended.convicted, ended.cleared, ended.unexplained, ended.undecided, ended.closest)


def _divergence(one: Floats, other: Floats) -> float:
    """Of two normal distributions, fitted to rows [n, d]: of the first from the second."""
    mean = other.mean(axis=0) - one.mean(axis=0)
    # A figure that never changes would make the other infinitely far.
    least = np.diag(np.full(one.shape[1], LEAST_SD**2))
    first, second = (np.cov(rows, rowvar=False) + least for rows in (one, other))
    inverse = np.linalg.inv(second)
    parts = np.trace(inverse @ first) + mean @ inverse @ mean - len(mean)
    return float(parts + np.linalg.slogdet(second)[1] - np.linalg.slogdet(first)[1]) / 2
