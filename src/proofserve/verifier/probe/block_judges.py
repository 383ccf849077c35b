"""The tests of log-probabilities: those of ``verify``, with blocks of tokens as nonces.

An endpoint has no calibration. What honest kernels do to these very answers is emulated instead.
All methods that compare blocks raise EngineFault.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.protocol.verdict.directions import cosine
from proofserve.protocol.verdict.evidence import log_path, rare_factors
from proofserve.protocol.verdict.scale import CONVICTING
from proofserve.verifier.error_judges import DirectionJudge, FootprintJudge, PairedJudge
from proofserve.verifier.judges import (
    OWN,
    BankRun,
    Chances,
    Figures,
    Judge,
    Opinion,
    Variant,
    Vectors,
    evidence_text,
    result_of,
)
from proofserve.verifier.noise import RunMeasurement
from proofserve.verifier.populations import (
    LEAST_REACH,
    HonestPopulations,
    HonestRuns,
    OwnRun,
    populations,
)
from proofserve.verifier.simulation import convictions, draws, node_figures
from proofserve.verifier.written.readings import ReadAnswer, Readings

# Tokens in a block: enough that errors have a direction, few enough that an answer has several.
SIZE = 16

# Where a token stands: which of the answers, which of its tokens.
_Place = tuple[int, int]
# Blocks on which every honest kernel and every suspect is computed, before the tests begin.
MEASURED_ON: Final = 16
# The share of honest blocks beyond what convicts. None of ``MEASURED_ON`` blocks of any kernel is,
# compared with the others, which shows this much with a confidence of 99 %.
BEYOND: Final = 0.25
# Of the blocks of an endpoint that does not serve the model.
FORGED_SHARES: Final = (0.95, 0.7, 0.45)
# Of the blocks that a cleared endpoint has not computed by other weights, and the part of the
# footprint that it does not lack in all. Beside our own rounding a server keeps so little of one
# that less would take hundreds of prompts.
_SHARE, _KEPT = 0.5, 0.5
# Verifications of each kernel by the others, and blocks of each, before kernels judge an endpoint.
_VERIFICATIONS, _BLOCKS = 200, 200
# A suspect whose mean cosine with the errors is as large explains them, whatever their size. What
# convicts by a cosine is named at a smaller one: rounding may be as large as what it adds to.
EXPLAINING_COSINE: Final = 0.5
# How many times as wide margins may become until none of them is convicted so.
_ROOMS: Final = (1.0, 1.5, 2.0, 3.0, 4.0)


class ProbeBlocks:
    """The tokens of all answers in a row, cut into blocks of ``SIZE``, numbered from 0.

    The vector of a block has those of its tokens, one behind the other. Implements
    ``verifier.judges.KernelBank``; tokens without log-probabilities are in no block.
    """

    def __init__(self, readings: Readings) -> None:
        self.names: Sequence[str] = readings.names
        self.kernels: Sequence[str] = readings.kernels
        self.references: Sequence[str] = readings.references
        self.variants: Mapping[str, Mapping[Variant, str]] = {}
        self.round_activations = readings.round_activations
        self._readings = readings
        self._answers: list[ReadAnswer] = []
        self._waiting: list[_Place] = []
        self._blocks: list[tuple[_Place, ...]] = []

    def add(self, answer: ReadAnswer) -> list[ClaimError]:
        """The errors of the blocks that this answer completes."""
        index = len(self._answers)
        self._answers.append(answer)
        self._waiting += [(index, t) for t, error in enumerate(answer.errors) if error.size]
        before = len(self._blocks)
        while len(self._waiting) >= SIZE:
            self._blocks.append(tuple(self._waiting[:SIZE]))
            del self._waiting[:SIZE]
        new = range(before, len(self._blocks))
        return [ClaimError(n, self._vector(n, lambda i: self._answers[i].errors)) for n in new]

    def expect(self, runs: Mapping[BankRun, Sequence[int]]) -> None:
        """Answers are read one by one."""

    def errors(self, run: BankRun, nonces: Sequence[int]) -> Vectors:
        """What an honest run does to each block."""

        def of(index: int) -> Sequence[NDArray[np.float32]]:
            answer = self._answers[index]
            if run == OWN:
                return answer.own
            (kernels,) = self._readings.by_kernels([answer])
            return kernels[str(run.kernels)].errors

        return {n: self._vector(n, of) for n in nonces}

    def answers_of(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """The answer in which each block begins."""
        return np.array([self._blocks[n][0][0] for n in numbers])

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        """What the suspect's weights would do to each block."""
        needed = sorted({index for n in nonces for index, _ in self._blocks[n]})
        made = self._readings.by_suspect(name, [self._answers[index] for index in needed])
        found = {index: each.predicted for index, each in zip(needed, made, strict=True)}
        return {n: self._vector(n, found.__getitem__) for n in nonces}

    def _vector(
        self, number: int, of: Callable[[int], Sequence[NDArray[np.float32]]]
    ) -> NDArray[np.float32]:
        return np.concatenate([of(index)[t] for index, t in self._blocks[number]])


class SizeJudge(Judge[ClaimError]):
    """Counts blocks whose errors are ``allowance`` times every honest kernel's; it cannot clear."""

    name = "sizes"
    clears = False

    def __init__(self, blocks: ProbeBlocks, allowance: float, chances: Chances) -> None:
        self._blocks = blocks
        self._allowance = allowance
        self._chances = chances
        # Of each block whether its errors are so large.
        self._beyond: list[bool] = []

    def add(self, error: ClaimError) -> None:
        runs = (OWN, *(BankRun(kernels=kernel) for kernel in self._blocks.kernels))
        honest = (self._blocks.errors(run, [error.nonce])[error.nonce] for run in runs)
        beyond = all(
            error.distance > self._allowance * float(np.linalg.norm(each)) for each in honest
        )
        self.nonces += 1
        self._beyond.append(beyond)

    @property
    def _log_evidence(self) -> float:
        happened = np.array(self._beyond, dtype=bool)
        return float(log_path(rare_factors(happened, BEYOND, FORGED_SHARES)).max())

    def result(self) -> SequentialResult:
        return result_of(convicts=self._log_evidence >= self._chances.convicts_at)

    def _says(self, result: SequentialResult) -> tuple[str, Figures]:
        log_evidence = self._log_evidence
        said = f", {evidence_text(log_evidence)}" if result is SequentialResult.FRAUD else ""
        text = (
            f"{sum(self._beyond)} of {self.nonces} blocks have errors more than"
            f" {self._allowance:.2g} times those of every emulated kernel{said}"
        )
        return text, {"log_evidence": log_evidence}


class BlockJudges:
    """The sizes of the errors and their directions, at ``chances`` each.

    ``judges`` is empty before ``MEASURED_ON`` blocks. ``unseen`` are suspects that these answers do
    not tell from the published weights; ``ratios`` are all errors over our own rounding.
    """

    def __init__(self, readings: Readings, chances: Chances) -> None:
        self._blocks = ProbeBlocks(readings)
        self._servers = readings.servers
        self._hides_lies = readings.hides_lies
        self._chances = replace(chances, share=_SHARE, kept=_KEPT)
        self._waiting: list[ClaimError] = []
        self.judges: tuple[Judge[ClaimError], ...] = ()
        self.unseen: tuple[str, ...] = ()
        self._errors: list[ClaimError] = []
        self.ratios: list[float] = []

    def add(self, answer: ReadAnswer) -> None:
        """Judge the blocks that this answer completes. Raises EngineFault."""
        errors = self._blocks.add(answer)
        own = self._blocks.errors(OWN, [error.nonce for error in errors])
        self.ratios += [e.distance / float(np.linalg.norm(own[e.nonce])) for e in errors]
        self._errors += errors
        self._waiting += errors
        if not self.judges and len(self._waiting) >= MEASURED_ON:
            self._begin([error.nonce for error in self._waiting[:MEASURED_ON]])
        if self.judges:
            # One by one: the suspects of a block are chosen by what the blocks before it showed.
            for error in self._waiting:
                for judge in self.judges:
                    judge.plan([error.nonce])
                    judge.prepare([error])
                    judge.add(error)
            self._waiting.clear()

    def explaining(self, opinions: Sequence[Opinion]) -> tuple[str | None, list[float]]:
        """The suspect that explains the errors, and its cosines with them. Raises EngineFault."""
        if not self._errors:
            return None, []
        for each in opinions:
            if each.result is SequentialResult.FRAUD and "suspect" in each.figures:
                convicted = str(each.figures["suspect"])
                return convicted, self._cosines(convicted, len(self._errors))
        few = {n: float(np.mean(self._cosines(n, MEASURED_ON))) for n in self._blocks.names}
        best = max(few, key=few.__getitem__)
        if few[best] < EXPLAINING_COSINE:
            return None, []
        return best, self._cosines(best, len(self._errors))

    def _cosines(self, name: str, most: int) -> list[float]:
        """Those of the first blocks, ``most`` at most, with a suspect."""
        errors = self._errors[:most]
        predicted = self._blocks.predictions(name, [error.nonce for error in errors])
        return [cosine(e.error, predicted[e.nonce]) for e in errors if e.error is not None]

    def _begin(self, numbers: Sequence[int]) -> None:
        """Measure the first blocks by honest runs and suspects, and make the tests."""
        blocks = self._blocks
        own = blocks.errors(OWN, numbers)
        moved: dict[str, Vectors] = {}
        for name in blocks.names:
            predicted = blocks.predictions(name, numbers)
            reaches = [np.linalg.norm(predicted[n]) / np.linalg.norm(own[n]) for n in numbers]
            if np.median(reaches) >= LEAST_REACH:
                moved[name] = predicted
        self.unseen = tuple(name for name in blocks.names if name not in moved)
        emulated = {n: blocks.errors(BankRun(kernels=n), numbers) for n in blocks.kernels}
        # One that does the same as the exact network has no errors to compare with.
        known = {n: of for n, of in emulated.items() if all(each.any() for each in of.values())}
        measuring = RunMeasurement(numbers, {str(OWN.kernels): own}, moved)
        runs = {
            n: measuring.fields(of).figures for n, of in {str(OWN.kernels): own, **known}.items()
        }
        largest = np.sort([each.lengths for each in runs.values()], axis=0)
        # Larger if a kernel's errors are larger than all others' themselves.
        allowance = CONVICTING * float((largest[-1] / largest[-2]).max())
        self.judges = (SizeJudge(blocks, allowance, self._chances),)
        width = min(len(each) for each in own.values())
        answers = blocks.answers_of(numbers)
        gathered = HonestRuns(runs, self._servers, measuring.lengths, width, answers)
        honest = _honest(gathered, self._chances)
        if honest is None or not moved or self._hides_lies:
            return
        ours = OwnRun(blocks, lambda _reference: honest, blocks.references)
        self.judges = (
            *self.judges,
            PairedJudge(ours, self._chances),
            DirectionJudge(blocks, ours, self._chances, tuple(moved)),
            FootprintJudge(ours, self._chances),
        )


def _honest(known: HonestRuns, chances: Chances) -> HonestPopulations | None:
    """With margins so wide that no kernel is convicted by the others; None if none are.

    Blocks of one answer are alike, and the figures allow for it.
    """
    own = known.runs[str(OWN.kernels)]

    def is_convicted(name: str, honest: HonestPopulations) -> bool:
        others = honest.without(name)
        node = node_figures(known.runs[name], {others.reference: own}, others, known.predicted)
        drawn = draws(len(node), _VERIFICATIONS, _BLOCKS)
        return bool((convictions(node, others, chances, drawn) <= _BLOCKS).any())

    every = (populations(known, str(OWN.kernels), room) for room in _ROOMS)
    return next((h for h in every if not any(is_convicted(n, h) for n in known.runs)), None)
