"""The tests that reach a verdict, each from the errors of one nonce after the other.

A test has a standing with every honest population, because a node is honest if it is one of them.
The direction test and the exact one are in ``direction`` and ``verification``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.codec import to_float16
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.counting import check_inside, judge, power
from proofserve.protocol.verdict.evidence import Evidence
from proofserve.protocol.verdict.leaning import LEANING_BETS
from proofserve.protocol.verdict.scale import SizeBets
from proofserve.protocol.verdict.sequential import SequentialResult, SequentialTest
from proofserve.protocol.verdict.twins import alikeness, twin_log_clearing
from proofserve.verifier.populations import TWINS, HonestPopulations

T = TypeVar("T")
# Vectors by nonce, float32 [width] each, and a function that computes them.
Vectors = Mapping[int, NDArray[np.float32]]
Recompute = Callable[[Sequence[int]], Vectors]
# The numbers behind an opinion, by their names.
Figures = Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class BankRun:
    """A run of a validator: a suspect's ``weights``, None for the published ones, in ``kernels``.

    These are a name of emulated ones, None for exact arithmetic.
    """

    weights: str | None = None
    kernels: str | None = None

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.weights or "published", self.kernels)))


PUBLISHED: Final = BankRun()
# The validator's own honest run, in the dtype that nodes serve.
OWN: Final = BankRun(kernels="our own rounding")


def as_sent(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """``vector`` as a validator gets it: rounded to the float16 of the wire (protocol B.4)."""
    return to_float16(vector).astype(np.float32)


class KernelBank(Protocol):
    """Suspected weights by ``names``, and how each would move the results; and honest kernels."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def kernels(self) -> Sequence[str]: ...

    def expect(self, runs: Mapping[BankRun, Sequence[int]]) -> None:
        """What will be asked for next: a bank may compute it together."""

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        """The suspect's vectors less the published model's, float32 [width] each."""

    def errors(self, run: BankRun, nonces: Sequence[int]) -> Vectors:
        """By how much a run differs from the published vectors on the wire, float32 [width]."""


# The shares of forged nonces of which a verdict says whether it excludes them.
SHARES_EXCLUDED: Final = (1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
# The chances of a wrong verdict, unless options say otherwise.
ALPHA, BETA = 1e-6, 1e-3
# By default a cleared node has not forged half of its nonces, nor a tenth if the sample is large
# enough to tell: 0.9^66 is 1e-3, and an honest nonce says a little less than that.
COARSE_SHARE, FINE_SHARE, FINE_SAMPLE = 0.5, 0.1, 80


def default_share(sample: int) -> float:
    """By the size of a ``sample``."""
    return FINE_SHARE if sample >= FINE_SAMPLE else COARSE_SHARE


@dataclass(frozen=True, slots=True)
class Chances:
    """The largest chances of one test to convict an honest node, and to clear a fraud.

    The tests of sizes clear no fraud that forges at least ``share`` of its nonces; wrong weights in
    fewer save too little. Raises ProtocolError for a chance or share out of range.
    """

    alpha: float = ALPHA
    beta: float = BETA
    share: float = COARSE_SHARE

    def __post_init__(self) -> None:
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
class Standing:
    """What one test says of one honest population.

    ``excess`` is the logarithm of the most evidence against it, less what refutes it. A population
    that is refuted is not the node's; only one that ``convicts`` speaks of fraud.
    """

    excess: float
    refutes: bool
    convicts: bool
    clears: bool

    @property
    def result(self) -> SequentialResult:
        if self.convicts:
            return SequentialResult.FRAUD
        if self.refutes:
            return SequentialResult.UNEXPLAINED
        return SequentialResult.HONEST if self.clears else SequentialResult.UNDECIDED


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one test found after ``nonces``; ``text`` says it in words, for a reader."""

    test: str
    result: SequentialResult
    nonces: int
    text: str
    figures: Figures


class Judge(ABC, Generic[T]):
    """A test, from what one nonce after the other shows: an error, or an answer of an endpoint."""

    name: str
    # Whether the test can say that a node is honest, or only that it is not.
    clears = True
    # Those that it has judged: nonces, blocks of tokens or tokens.
    nonces = 0

    def plan(self, nonces: Sequence[int]) -> None:
        """Tell a bank what the test will need of nonces that are recomputed next."""

    def prepare(self, several: Sequence[T]) -> None:
        """Compute what the test needs besides, for several nonces in one go."""

    @abstractmethod
    def add(self, one: T) -> None:
        """Take one of the nonces that were prepared."""

    @abstractmethod
    def standings(self) -> Sequence[Standing]:
        """By population, in their order; one alone where the test knows no populations."""

    def opinion(self, population: int) -> Opinion:
        """What the test says of this one of its populations."""
        standings = self.standings()
        standing = standings[population if len(standings) > 1 else 0]
        text, figures = self._says(standing, population)
        return Opinion(self.name, standing.result, self.nonces, text, figures)

    @abstractmethod
    def _says(self, standing: Standing, population: int) -> tuple[str, Figures]:
        """What the test found, in words and in numbers."""


def evidence_text(log_evidence: float) -> str:
    power_of_ten = log_evidence / math.log(10)
    return f"E = {10**power_of_ten:.2g}" if abs(power_of_ten) < 300 else f"E = 1e{power_of_ten:.0f}"


def few(names: Sequence[str], most: int = 3) -> str:
    """The first of ``names``, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


class PairedJudge(Judge[ClaimError]):
    """Bets on errors that are larger than honest ones, beside the validator's ``own`` of the nonce.

    A nonce in which rounding weighs more than in others makes both long.
    """

    name = "paired"

    def __init__(self, own: Recompute, honest: HonestPopulations, chances: Chances) -> None:
        self._own = own
        self._honest = honest
        self._chances = chances
        self._shares = np.array(sorted({chances.share, *SHARES_EXCLUDED}, reverse=True))
        members = honest.members
        self._convicting = [Evidence(SizeBets.count) for _ in members]
        self._refuting = [Evidence(SizeBets.count) for _ in members]
        self._clearing = np.zeros((len(members), 1 + len(self._shares)))
        self._lengths: dict[int, float] = {}
        self._ratios: list[float] = []

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        own = self._own([error.nonce for error in errors if error.error is not None])
        self._lengths = {nonce: float(np.linalg.norm(error)) for nonce, error in own.items()}

    def add(self, error: ClaimError) -> None:
        # A claim without a vector is infinitely far.
        own = np.array([self._lengths.get(error.nonce, 1.0)])
        ratio = self._honest.shares.ratios(np.array([error.distance]), own)
        self._ratios.append(float(ratio[0]))
        self.nonces += 1
        for index, member in enumerate(self._honest.members):
            self._convicting[index].add(member.convicting.log_factors(ratio)[0])
            self._refuting[index].add(member.refuting.log_factors(ratio)[0])
            self._clearing[index] += member.fit.log_clearing(ratio, self._shares)[0]

    def standings(self) -> list[Standing]:
        limit = self._chances.convicts_at
        needed = 1 + int(np.flatnonzero(self._shares == self._chances.share)[0])
        cleared = self._clearing[:, [0, needed]].min(axis=1) >= self._chances.clears_at
        return [
            Standing(refuting.peak - limit, refuting.peak >= limit, convicting.peak >= limit, clear)
            for convicting, refuting, clear in zip(
                self._convicting, self._refuting, cleared.tolist(), strict=True
            )
        ]

    def _says(self, standing: Standing, population: int) -> tuple[str, Figures]:
        convicts = self._convicting[population].peak
        shown = convicts if standing.convicts else self._refuting[population].peak
        figures: dict[str, float | str] = {"log_evidence": shown}
        text = f"errors are {np.median(self._ratios):.2g} times ours (median)"
        cleared = self._clearing[population] >= self._chances.clears_at
        if standing.clears and (excluded := self._shares[cleared[1:]]).size:
            figures["excluded_share"] = float(excluded[-1])
        elif shown > 0.0:
            text = f"{text}, {evidence_text(shown)}"
        return text, figures


class TwinJudge(Judge[ClaimError]):
    """Asks whether the errors of twins are more alike than those of honest kernels.

    It refutes populations and does not convict: kernels that were not measured differ in this.
    """

    name = TWINS

    def __init__(self, own: Recompute, honest: HonestPopulations, chances: Chances) -> None:
        self._own = own
        self._leans = [member.leans[TWINS] for member in honest.members]
        self._share = honest.shares.leans[TWINS]
        self._chances = chances
        self._evidence = [Evidence(LEANING_BETS) for _ in self._leans]
        self._clearing = np.zeros(len(self._leans))
        self._known: Vectors = {}

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        self._known = self._own([error.nonce for error in errors if error.error is not None])

    def add(self, error: ClaimError) -> None:
        # A claim without a vector has no direction; the test of sizes counts it.
        if error.error is None:
            return
        self.nonces += 1
        ours = alikeness(self._known[error.nonce])
        figure = np.array([alikeness(error.error) - self._share * ours])
        for index, lean in enumerate(self._leans):
            self._evidence[index].add(lean.log_factors(figure)[0])
            self._clearing[index] += twin_log_clearing(figure, lean.mean)[0]

    def standings(self) -> list[Standing]:
        limit = self._chances.convicts_at
        cleared = (self._clearing >= self._chances.clears_at).tolist()
        return [
            Standing(each.peak - limit, each.peak >= limit, convicts=False, clears=clear)
            for each, clear in zip(self._evidence, cleared, strict=True)
        ]

    def _says(self, _standing: Standing, population: int) -> tuple[str, Figures]:
        log_evidence = self._evidence[population].peak
        return evidence_text(log_evidence), {"log_evidence": log_evidence}


@dataclass(frozen=True, slots=True)
class CountRule:
    """A claim further than ``dist_threshold`` (L2) from our vector is a mismatch.

    A ``sequential`` test decides after any nonce, another one after the whole sample. Raises
    ProtocolError for a threshold that is negative or not finite.
    """

    test: SequentialTest
    dist_threshold: float
    sequential: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.dist_threshold < math.inf:
            text = f"{self.dist_threshold} is not a finite number from 0 on"
            raise ProtocolError("dist_threshold", text)

    @property
    def description(self) -> str:
        test = self.test
        how = "one after the other, until the test decides" if self.sequential else "all at once"
        return (
            f"A claim is a mismatch if it is further than {self.dist_threshold:g} from the"
            f" recomputed vector. An honest node has mismatches in at most {test.p_honest:g} of its"
            f" nonces, a fraud in at least {test.p_fraud:g}. The nonces are judged {how}. An honest"
            f" node is convicted with a chance of at most {test.alpha:g}, a fraud is cleared with"
            f" at most {test.beta:g}."
        )


class CountJudge(Judge[ClaimError]):
    """Counts mismatches among the ``sample`` nonces of a verification: the network's test."""

    name = "count"

    def __init__(self, rule: CountRule, sample: int) -> None:
        self._rule = rule
        self._sample = sample
        self._mismatches = 0

    def add(self, error: ClaimError) -> None:
        self.nonces += 1
        # The comparison of a validator is in float32 (protocol B.4).
        far = np.float32(error.distance) > np.float32(self._rule.dist_threshold)
        self._mismatches += bool(far)

    def standings(self) -> list[Standing]:
        result = self._result()[0]
        convicts = result is SequentialResult.FRAUD
        return [Standing(0.0, convicts, convicts, result is SequentialResult.HONEST)]

    def _says(self, _standing: Standing, _population: int) -> tuple[str, Figures]:
        _, name, figure = self._result()
        text = f"{self._mismatches} mismatches, {name} {figure:.3g}"
        return text, {name.replace(" ", "_").replace("-", "_"): figure, **asdict(self._rule.test)}

    def _result(self) -> tuple[SequentialResult, str, float]:
        """The result, and the name and value of the figure behind it."""
        test = self._rule.test
        if self._rule.sequential:
            ratio = math.exp(test.log_ratio(self._mismatches, self.nonces))
            return test.result(self._mismatches, self.nonces), "likelihood ratio", ratio
        judged = judge(self._mismatches, self.nonces, test.p_honest, test.alpha)
        result = SequentialResult.UNDECIDED
        if self.nonces == self._sample:
            # With too few nonces the test would also miss too many frauds.
            strong = power(self.nonces, test.p_honest, test.alpha, test.p_fraud) >= 1 - test.beta
            result = SequentialResult.HONEST if strong else result
            result = SequentialResult.FRAUD if judged.fraud_detected else result
        return result, "p-value", judged.p_value
