"""The tests that reach a verdict, each from the errors of one nonce after the other."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.rank import RankEvidence
from proofserve.protocol.verdict.scale import ScaleClearing, ScaleEvidence, ScaleFit
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.protocol.verdict.twins import TwinEvidence

# Vectors by nonce, float32 [width] each, and a function that computes them.
Vectors = Mapping[int, NDArray[np.float32]]
Recompute = Callable[[Sequence[int]], Vectors]


@dataclass(frozen=True, slots=True)
class Chances:
    """The largest chances of one test to convict an honest node, and to clear a fraud."""

    alpha: float
    beta: float

    @property
    def convicts_at(self) -> float:
        """The logarithm of the evidence that convicts."""
        return -math.log(self.alpha)

    @property
    def clears_at(self) -> float:
        return -math.log(self.beta)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one test found after ``nonces``; ``text`` says it in words, for a reader.

    ``figures`` are the numbers behind it, by their names.
    """

    test: str
    result: SequentialResult
    nonces: int
    text: str
    figures: Mapping[str, float | str]


class Judge(Protocol):
    # Whether the test can say that a node is honest, or only that it is not.
    clears: bool

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        """Compute what the test needs besides the errors, for several nonces in one go."""

    def add(self, error: ClaimError) -> None:
        """Take one of the nonces that were prepared."""

    def finding(self) -> Finding: ...


class ScaleJudge:
    """Bets on distances larger than the calibration's."""

    clears = True

    def __init__(self, fit: ScaleFit, chances: Chances) -> None:
        self._evidence = ScaleEvidence(fit)
        self._clearing = ScaleClearing(fit)
        self._chances = chances
        self._nonces = 0

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        pass

    def add(self, error: ClaimError) -> None:
        self._nonces += 1
        self._evidence.add(error.distance)
        self._clearing.add(error.distance)

    def finding(self) -> Finding:
        cleared = self._clearing.log >= self._chances.clears_at
        return finding_of("scale", self._evidence.log, cleared, self._chances, self._nonces)


class RankJudge:
    """Bets on distances that rank high among the calibration's."""

    clears = False

    def __init__(self, honest: Sequence[float], chances: Chances) -> None:
        self._evidence = RankEvidence(honest)
        self._chances = chances
        self._nonces = 0

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        pass

    def add(self, error: ClaimError) -> None:
        self._nonces += 1
        self._evidence.add(error.distance)

    def finding(self) -> Finding:
        return finding_of("rank", self._evidence.log, False, self._chances, self._nonces)


class TwinJudge:
    """Bets on twins whose errors are more alike than those of ``served``.

    ``served`` is the validator's own model in the dtype that the node serves, ``truth`` the one
    that the errors are against.
    """

    clears = True

    def __init__(self, truth: Recompute, served: Recompute, chances: Chances) -> None:
        self._truth = truth
        self._served = served
        self._chances = chances
        self._evidence = TwinEvidence()
        self._own: dict[int, NDArray[np.float32]] = {}
        self._nonces = 0

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        nonces = [error.nonce for error in errors if error.error is not None]
        truth, served = self._truth(nonces), self._served(nonces)
        self._own = {nonce: served[nonce] - truth[nonce] for nonce in nonces}

    def add(self, error: ClaimError) -> None:
        # A claim without a vector has no direction; the other tests count it.
        if error.error is not None:
            self._nonces += 1
            self._evidence.add(error.error, self._own[error.nonce])

    def finding(self) -> Finding:
        cleared = self._evidence.log_clearing >= self._chances.clears_at
        return finding_of("twins", self._evidence.log, cleared, self._chances, self._nonces)


def finding_of(
    test: str, log_evidence: float, cleared: bool, chances: Chances, nonces: int
) -> Finding:
    """Fraud by the evidence, else honest if the test ``cleared`` the node, else undecided."""
    result = SequentialResult.HONEST if cleared else SequentialResult.UNDECIDED
    if log_evidence >= chances.convicts_at:
        result = SequentialResult.FRAUD
    text, figures = evidence_text(log_evidence), {"log_evidence": log_evidence}
    return Finding(test, result, nonces, text, figures)


def evidence_text(log_evidence: float) -> str:
    power_of_ten = log_evidence / math.log(10)
    return f"E = {10**power_of_ten:.2g}" if abs(power_of_ten) < 300 else f"E = 1e{power_of_ten:.0f}"
