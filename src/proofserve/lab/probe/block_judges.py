"""The tests of log-probabilities: those of ``verify``, with blocks of tokens as nonces.

An endpoint has no calibration. What honest kernels do to these very answers is emulated instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.probe.blocks import ProbeBlocks
from proofserve.lab.verify.direction import CalibratedYardstick, DirectionJudge
from proofserve.lab.verify.judges import (
    Chances,
    Finding,
    Judge,
    PairedJudge,
    Standing,
    Vectors,
    evidence_text,
    result_of,
)
from proofserve.lab.verify.populations import HonestPopulations, RunFigures, populations
from proofserve.lab.verify.simulation import convictions, draws, node_figures
from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.evidence import RareEvidence
from proofserve.protocol.verdict.leaning import cosine
from proofserve.protocol.verdict.scale import CONVICTING

# Blocks on which every honest kernel and every suspect is computed, before the tests begin.
MEASURED_ON: Final = 16
# The share of honest blocks beyond what convicts. None of ``MEASURED_ON`` blocks of any kernel is,
# compared with the others, which shows this much with a confidence of 99 %.
BEYOND: Final = 0.25
# Of the blocks of an endpoint that does not serve the model.
FORGED_SHARES: Final = (0.95, 0.7, 0.45)
# A suspect that moves the results less than honest rounding does cannot be told from it.
LEAST_COSINE: Final = 0.2
# Verifications of each kernel by the others, and blocks of each, before kernels judge an endpoint.
_VERIFICATIONS, _BLOCKS = 200, 200
# How many times as wide margins may become until none of them is convicted so.
_ROOMS: Final = (1.0, 1.5, 2.0, 3.0, 4.0)

Floats = NDArray[np.float64]


class SizeJudge:
    """Counts blocks whose errors are ``allowance`` times as large as those of every honest kernel.

    It can convict and not clear. Only a block that is large beside our own run is computed by the
    kernels.
    """

    clears = False

    def __init__(self, blocks: ProbeBlocks, allowance: float, chances: Chances) -> None:
        self._blocks = blocks
        self._allowance = allowance
        self._chances = chances
        self._evidence = RareEvidence(BEYOND, FORGED_SHARES)
        self._beyond = self._count = 0

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        """Everything is computed for the blocks that need it."""

    def add(self, error: ClaimError) -> None:
        """Raises EngineFault."""
        own = self._blocks.own_errors([error.nonce])
        beyond = self._is_beyond(error, own) and all(
            self._is_beyond(error, self._blocks.kernel_errors(kernel, [error.nonce]))
            for kernel in self._blocks.kernels
        )
        self._count += 1
        self._beyond += beyond
        self._evidence.add(np.array([beyond]))

    def _is_beyond(self, error: ClaimError, honest: Vectors) -> bool:
        return error.distance > self._allowance * float(np.linalg.norm(honest[error.nonce]))

    def standings(self) -> list[Standing]:
        excess = self._evidence.peak - self._chances.convicts_at
        return [Standing(excess, excess >= 0.0, excess >= 0.0, clears=False)]

    def finding(self, _population: int) -> Finding:
        (standing,) = self.standings()
        log_evidence = self._evidence.peak
        text = (
            f"{self._beyond} of {self._count} blocks have errors more than {self._allowance:.2g}"
            " times those of every emulated kernel"
        )
        if standing.convicts:
            text = f"{text}, {evidence_text(log_evidence)}"
        figures = {"log_evidence": log_evidence}
        return Finding("sizes", result_of(standing), self._count, text, figures)


class _SomeSuspects:
    """Implements ``lab.verify.direction.Bank`` with a part of the bank's suspects."""

    def __init__(self, blocks: ProbeBlocks, names: Sequence[str]) -> None:
        self.names = names
        self.predictions = blocks.predictions
        self.own_errors = blocks.own_errors


@dataclass(frozen=True, slots=True)
class _Measured:
    """The first blocks by our own run and honest kernels, and what suspects' provers would show."""

    own: RunFigures
    kernels: Mapping[str, RunFigures]
    suspects: Mapping[str, Floats]
    answers: NDArray[np.int64]

    def honest(self, chances: Chances) -> HonestPopulations | None:
        """With margins so wide that no kernel is convicted by the others; None if none are.

        Blocks of one answer are alike, and the figures allow for it.
        """
        for room in _ROOMS:
            found = populations(self.own, self.kernels, self.suspects, self.answers, room)
            if not any(self._is_convicted(name, found, chances) for name in self.kernels):
                return found
        return None

    def _is_convicted(self, name: str, honest: HonestPopulations, chances: Chances) -> bool:
        node = node_figures(self.kernels[name], self.own, honest)
        drawn = draws(len(node), _VERIFICATIONS, _BLOCKS)
        return bool((convictions(node, honest.without(name), chances, drawn) <= _BLOCKS).any())

    @property
    def allowance(self) -> float:
        """More than ``CONVICTING`` if a kernel's errors are larger than all others' themselves."""
        largest = np.sort([each.lengths for each in (self.own, *self.kernels.values())], axis=0)
        return CONVICTING * float((largest[-1] / largest[-2]).max())


class BlockJudges:
    """The sizes of the errors and their directions, at ``chances`` each.

    ``judges`` is empty before ``MEASURED_ON`` blocks. ``unseen`` are suspects that no
    log-probabilities of these answers tell from the published weights; ``ratios`` and ``errors``
    are those of every block so far.
    """

    def __init__(self, blocks: ProbeBlocks, chances: Chances) -> None:
        self._blocks = blocks
        self._chances = chances
        self._waiting: list[ClaimError] = []
        self.judges: tuple[Judge, ...] = ()
        self.unseen: tuple[str, ...] = ()
        self.errors: list[ClaimError] = []
        self.ratios: list[float] = []

    def add(self, errors: Sequence[ClaimError]) -> None:
        """Raises EngineFault."""
        own = self._blocks.own_errors([error.nonce for error in errors])
        self.ratios += [e.distance / float(np.linalg.norm(own[e.nonce])) for e in errors]
        self.errors += errors
        self._waiting += errors
        if not self.judges and len(self._waiting) >= MEASURED_ON:
            self._begin([error.nonce for error in self._waiting[:MEASURED_ON]])
        if self.judges:
            # One by one: the suspects of a block are chosen by what the blocks before it showed.
            for error in self._waiting:
                for judge in self.judges:
                    judge.prepare([error])
                    judge.add(error)
            self._waiting.clear()

    @property
    def can_clear(self) -> bool:
        """Whether both sizes and directions are judged."""
        return any(isinstance(judge, DirectionJudge) for judge in self.judges)

    @property
    def names(self) -> Sequence[str]:
        return self._blocks.names

    def cosines(self, name: str, most: int) -> list[float]:
        """Those of the first blocks, ``most`` at most, with a suspect. Raises EngineFault."""
        errors = self.errors[:most]
        predicted = self._blocks.predictions(name, [error.nonce for error in errors])
        return [cosine(e.error, predicted[e.nonce]) for e in errors if e.error is not None]

    def _begin(self, numbers: Sequence[int]) -> None:
        measured = self._measured(numbers)
        self.judges = (SizeJudge(self._blocks, measured.allowance, self._chances),)
        honest = measured.honest(self._chances)
        if honest is None or not measured.suspects:
            return
        bank = _SomeSuspects(self._blocks, tuple(measured.suspects))
        yardstick = CalibratedYardstick(bank, honest)
        self.judges = (
            *self.judges,
            PairedJudge(bank.own_errors, honest, self._chances),
            DirectionJudge(bank, yardstick, self._chances),
        )

    def _measured(self, numbers: Sequence[int]) -> _Measured:
        blocks = self._blocks
        own = blocks.own_errors(numbers)
        moved: dict[str, Vectors] = {}
        suspects: dict[str, Floats] = {}
        for name in blocks.names:
            predicted = blocks.predictions(name, numbers)
            # A prover with these weights rounds as we do, and errs by what the weights move too.
            errors = {n: own[n] + predicted[n] for n in numbers}
            cosines = np.array([cosine(errors[n], predicted[n]) for n in numbers])
            if cosines.mean() >= LEAST_COSINE:
                moved[name], suspects[name] = predicted, cosines
        self.unseen = tuple(name for name in blocks.names if name not in suspects)
        emulated = {each: blocks.kernel_errors(each, numbers) for each in blocks.kernels}
        # One that does the same as the exact network has no errors to compare with.
        kernels = {n: of for n, of in emulated.items() if all(each.any() for each in of.values())}
        return _Measured(
            _figures(own, moved),
            {name: _figures(errors, moved) for name, errors in kernels.items()},
            suspects,
            blocks.answers_of(numbers),
        )


def _figures(errors: Vectors, moved: Mapping[str, Vectors]) -> RunFigures:
    return RunFigures(
        lengths=np.array([float(np.linalg.norm(error)) for error in errors.values()]),
        alike=None,
        cosines={
            name: np.array([cosine(error, predicted[n]) for n, error in errors.items()])
            for name, predicted in moved.items()
        },
        rows=np.arange(len(errors)),
    )
