"""Measures what honest runs of a model look like, and whether that convicts kernels it lacks."""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.directions import cosine
from proofserve.reports import Progress, ReportedError
from proofserve.rounds.computation import chunks
from proofserve.verifier.calibration_file import (
    VERSION,
    CalibrationFile,
    FigureFields,
    KernelFacts,
    LeftOutCheck,
    PopulationFields,
    rounded,
)
from proofserve.verifier.judges import BankRun, Chances, KernelBank, Recompute, Vectors, as_sent
from proofserve.verifier.populations import nearest
from proofserve.verifier.simulation import convictions, draws, node_figures
from proofserve.verifier.target import CONFIDENCE, quantile_interval

# The share of honest nonces beyond the threshold of the count.
RATE: Final = 0.01
# Nonces in one step of progress.
AT_ONCE: Final = 16
# An engine in float32 may send the published float16 vector of a nonce; a fit needs a length.
LEAST_LENGTH: Final = 1e-6
VERIFICATIONS, NONCES = 10_000, 1000
# How many times as wide the margins become until no population is convicted by the others.
ROOMS: Final = (1.0, 1.25, 1.5)
# Errors of an honest engine by nonce, less the published vectors, as on the wire.
HonestRun = tuple[KernelFacts, Vectors]


class CalibratingBank(KernelBank, Protocol):
    """A validator that also says what it is a validator of, and what its kernels emulate."""

    @property
    def weights_digest(self) -> str | None: ...

    @property
    def served_dtype(self) -> str: ...

    def kernel_facts(self, kernel: str) -> KernelFacts: ...


@dataclass(frozen=True, slots=True)
class MeasuringPlan:
    """The first ``emulated`` nonces are for each emulated kernel, ``bank`` for each suspect."""

    nonces: tuple[int, ...]
    emulated: int
    bank: int


def measured_calibration(
    bank: CalibratingBank,
    runs: Sequence[HonestRun],
    plan: MeasuringPlan,
    about: Mapping[str, Any],
    progress: Progress,
) -> CalibrationFile:
    """The figures of ``runs`` and of every emulated kernel of ``bank``.

    ``about`` has the other fields of the file. It lacks the check of ``left_out``. Raises
    EngineFault if a forward fails, and ReportedError for a suspect with the published weights.
    """
    first, first_ones = plan.nonces[: plan.bank], plan.nonces[: plan.emulated]
    predicted: dict[str, Vectors] = {}
    progress.step(f"{len(bank.names)} suspects on {len(first)} nonces", len(bank.names))
    for name in bank.names if first else ():
        predicted[name] = bank.predictions(name, first)
        if not any(vector.any() for vector in predicted[name].values()):
            raise ReportedError(f"suspect {name}: its vectors are those of the published weights")
        progress.advance()
    emulated: dict[str, Vectors] = {}
    for kernel in bank.kernels:
        nonces = plan.nonces if kernel in bank.references else first_ones
        compute = partial(bank.errors, BankRun(kernels=kernel))
        emulated[kernel] = _in_chunks(f"emulated kernel: {kernel}", compute, nonces, progress)
    references = {name: emulated[name] for name in bank.references}
    measuring = RunMeasurement(plan.nonces, references, predicted)
    every = [*runs, *((bank.kernel_facts(kernel), errors) for kernel, errors in emulated.items())]
    made = [PopulationFields(facts=of, figures=measuring.fields(errors)) for of, errors in every]
    return CalibrationFile(
        format="proofserve-calibration",
        version=VERSION,
        weights_digest=bank.weights_digest,
        served_dtype=bank.served_dtype,
        populations=made,
        suspects={name: rounded(lengths) for name, lengths in measuring.lengths.items()},
        dist_threshold=honest_threshold(made),
        p_mismatch=RATE,
        left_out=None,
        **about,
    )


def honest_runs(sent: Iterable[tuple[KernelFacts, Vectors]], truth: Vectors) -> list[HonestRun]:
    """The errors of what engines ``sent``. Those that say the same of themselves get numbers."""
    runs: list[HonestRun] = []
    for facts, vectors in sent:
        errors = {n: vector - as_sent(truth[n]) for n, vector in vectors.items()}
        runs.append((facts.named_beside([known.name for known, _ in runs]), errors))
    return runs


@dataclass(frozen=True, slots=True)
class RunMeasurement:
    """What the errors of a run are compared with: ``references`` on ``nonces``, and predictions.

    ``predicted`` are of the first of ``nonces``.
    """

    nonces: Sequence[int]
    references: Mapping[str, Vectors]
    predicted: Mapping[str, Vectors]

    @property
    def lengths(self) -> dict[str, NDArray[np.float64]]:
        """Of the predictions of each suspect, float64 [m]."""
        return {name: _lengths(vectors.values()) for name, vectors in self.predicted.items()}

    def fields(self, errors: Vectors) -> FigureFields:
        """What ``errors`` [width] of some of the nonces show.

        The nonces with predictions come first, so that the cosines belong to the first figures.
        """
        of_bank = next(iter(self.predicted.values()), {})
        first = [nonce for nonce in of_bank if nonce in errors]
        nonces = [*dict.fromkeys([*first, *errors])]
        place = {nonce: row for row, nonce in enumerate(self.nonces)}
        rows = [place[nonce] for nonce in nonces]

        def cosines(of: Vectors, among: Sequence[int]) -> list[float]:
            return rounded(np.array([cosine(errors[n], of[n]) for n in among]))

        return FigureFields(
            lengths=rounded(np.maximum(_lengths(errors[n] for n in nonces), LEAST_LENGTH)),
            footprints={name: cosines(of, nonces) for name, of in self.references.items()},
            cosines={name: cosines(of, first) for name, of in self.predicted.items()},
            rows=None if rows == list(range(len(rows))) else rows,
        )


def _lengths(vectors: Iterable[NDArray[np.float32]]) -> NDArray[np.float64]:
    return np.array([np.linalg.norm(each) for each in vectors], dtype=np.float64)


def honest_threshold(populations: Sequence[PopulationFields]) -> float:
    """The distance that at most a share ``RATE`` of any population's nonces exceeds.

    Of each the upper end of the 95 % interval of that quantile, whatever the distribution; the
    largest distance where there are too few to have one.
    """
    beyond = (1.0 - CONFIDENCE) / 2.0
    needed, highest = math.ceil(math.log(beyond) / math.log1p(-RATE)), 0.0
    for each in populations:
        distances = np.array(each.figures.lengths)
        enough = len(distances) >= needed
        high = quantile_interval(distances, 1.0 - RATE)[1] if enough else float(distances.max())
        highest = max(highest, high)
    # Rounded up to three digits.
    places = 2 - math.floor(math.log10(highest))
    return float(Decimal(highest).quantize(Decimal(1).scaleb(-places), ROUND_CEILING))


def _in_chunks(
    title: str, compute: Recompute, nonces: Sequence[int], progress: Progress
) -> Vectors:
    found: dict[int, NDArray[np.float32]] = {}
    for part in progress.over(f"{title}, {len(nonces)} nonces", chunks(nonces, AT_ONCE)):
        found |= compute(part)
    return found


def checked(
    file: CalibrationFile, progress: Progress, verifications: int = VERIFICATIONS
) -> CalibrationFile:
    """The file with its check."""
    return file.model_copy(update={"left_out": left_out(file, progress, verifications)})


def left_out(
    file: CalibrationFile, progress: Progress, verifications: int = VERIFICATIONS
) -> LeftOutCheck | None:
    """The check of a file; None if it has too few populations to judge one by others.

    Raises ReportedError if the margins that it needs are too wide for a verdict, with the kernels.
    """
    if len(file.populations) < 3:
        return None
    # Those that are convicted with each room, and how often.
    convicted: list[dict[str, int]] = []
    for room in ROOMS:
        convicted.append({})
        title = f"each kernel left out, margins times {room:g}"
        for each in progress.over(title, file.populations):
            if often := _convicted(file, each, room, verifications):
                convicted[-1][each.facts.name] = often
        if not convicted[-1]:
            return LeftOutCheck(
                verifications=verifications, nonces=NONCES, room=room, convicted=convicted[0]
            )
    named = ", ".join(convicted[-1])
    raise ReportedError(
        f"populations: {named} would be convicted by the others, even with margins {ROOMS[-1]:g}"
        " times as wide; leave out what is measured there, or measure another server of that kind"
    )


def require_explained(
    file: CalibrationFile, trusted: Sequence[str], verifications: int = VERIFICATIONS
) -> None:
    """Raise ReportedError, with their names, for measured nodes that the emulated kernels convict.

    A cheat that is taken for honest would have its like cleared. ``trusted`` are the measured nodes
    that are not asked; ReportedError if one of them was not measured.
    """
    measured = [each for each in file.populations if not each.facts.emulated]
    if unknown := {*trusted} - {each.facts.name for each in measured}:
        known = ", ".join(each.facts.name for each in measured) or "none"
        raise ReportedError(f"--trust {min(unknown)}: no such node was measured; measured: {known}")
    emulated = [each for each in file.populations if each.facts.emulated]
    for each in measured:
        beside = file.model_copy(update={"populations": [*emulated, each]})
        if each.facts.name not in trusted and _convicted(beside, each, ROOMS[0], verifications):
            raise ReportedError(
                f"populations: {each.facts.name} would be convicted by the emulated kernels alone;"
                " it may serve other weights than the checkpoint's. If you know that it does not,"
                f" give --trust {shlex.quote(each.facts.name)}"
            )


def _convicted(
    file: CalibrationFile, each: PopulationFields, room: float, verifications: int
) -> int:
    """Of so many verifications by the other kernels alone."""
    name, run = each.facts.name, each.figures.figures
    others = [other for other in file.references if other != name]
    reference = nearest(run, others or file.references)
    honest = file.null(reference, room).without(name)
    ours = {each: file.own(each) for each in others or file.references}
    found = np.zeros(verifications, dtype=bool)
    sizes = node_figures(replace(run, cosines={}), ours, honest, {})
    directions = node_figures(run, ours, honest, file.predicted)
    # Chance leans a few nonces to one of many suspects, and drawing them again and again would take
    # that for what the kernel does. So no more are drawn than there are.
    for node, most in ((sizes, NONCES), (directions, min(NONCES, len(directions)))):
        drawn = draws(len(node), verifications, most)
        found |= convictions(node, honest, Chances(), drawn) <= most
    return int(np.count_nonzero(found))


def left_out_lines(found: LeftOutCheck | None) -> list[str]:
    """The result of the check in words, for a reader."""
    if found is None:
        return ["one kernel alone: nothing says how others differ; give --other or --add"]
    tried = f"{found.verifications} verifications of {found.nonces} nonces each"
    if not found.convicted:
        return [f"each kernel left out in turn was convicted by the others in 0 of {tried}"]
    named = ", ".join(f"{name} in {count}" for name, count in found.convicted.items())
    return [
        f"left out, honest kernels would be convicted by the others: {named} of {tried}",
        f"so verdicts have margins {found.room:g} times as wide, with which none is",
    ]
