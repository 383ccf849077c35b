"""The tests that reach a verdict, each from the errors of one nonce after the other."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.counting import check_inside
from proofserve.protocol.verdict.rank import RankEvidence
from proofserve.protocol.verdict.scale import ScaleClearing, ScaleEvidence, ScaleFit
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.protocol.verdict.twins import TwinEvidence

# Vectors by nonce, float32 [width] each, and a function that computes them.
Vectors = Mapping[int, NDArray[np.float32]]
Recompute = Callable[[Sequence[int]], Vectors]


@dataclass(frozen=True, slots=True)
class Chances:
    """The largest chances of one test to convict an honest node, and to clear a fraud.

    The tests of sizes clear no fraud that forges at least ``share`` of its nonces without the
    model. Wrong weights in a part of the nonces save too little for the other tests to care.
    """

    alpha: float
    beta: float
    share: float = 1.0

    def __post_init__(self) -> None:
        """Raise ProtocolError for a chance outside 0..1, and for a share that is none."""
        check_inside("alpha", self.alpha)
        check_inside("beta", self.beta)
        if not 0.0 < self.share <= 1.0:
            raise ProtocolError("share", f"{self.share} is not above 0 and at most 1")

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

    name = "scale"
    clears = True

    def __init__(self, fit: ScaleFit, chances: Chances) -> None:
        self._evidence = ScaleEvidence(fit)
        self._clearing = ScaleClearing(fit, chances.share)
        self._chances = chances
        self._nonces = 0

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        pass

    def add(self, error: ClaimError) -> None:
        self._nonces += 1
        size = self._size(error)
        self._evidence.add(size)
        self._clearing.add(size)

    def finding(self) -> Finding:
        log_clearing = self._clearing.log
        cleared = log_clearing >= self._chances.clears_at
        found = finding_of(self.name, self._evidence.log, cleared, self._chances, self._nonces)
        return replace(found, figures={**found.figures, "log_clearing": log_clearing})

    def _size(self, error: ClaimError) -> float:
        return error.distance


class PairedJudge(ScaleJudge):
    """As ScaleJudge, of each distance over the length of the validator's own error.

    ``own`` are the errors of the validator's model in the dtype that the node serves. A nonce in
    which rounding weighs more than in others makes both long, so ratios spread less than distances.
    ``fit`` is of ratios.
    """

    name = "paired"

    def __init__(self, own: Recompute, fit: ScaleFit, chances: Chances) -> None:
        super().__init__(fit, chances)
        self._own = own
        self._lengths: dict[int, float] = {}

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        own = self._own([error.nonce for error in errors if error.error is not None])
        self._lengths = {nonce: float(np.linalg.norm(error)) for nonce, error in own.items()}

    def _size(self, error: ClaimError) -> float:
        # A claim without a vector is infinitely far.
        return error.distance / self._lengths.get(error.nonce, 1.0)


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
    """Bets on twins whose errors are more alike than the validator's own, as in PairedJudge."""

    clears = True

    def __init__(self, own: Recompute, chances: Chances) -> None:
        self._own = own
        self._chances = chances
        self._evidence = TwinEvidence()
        self._known: Vectors = {}
        self._nonces = 0

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        self._known = self._own([error.nonce for error in errors if error.error is not None])

    def add(self, error: ClaimError) -> None:
        # A claim without a vector has no direction; the other tests count it.
        if error.error is not None:
            self._nonces += 1
            self._evidence.add(error.error, self._known[error.nonce])

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
