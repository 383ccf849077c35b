"""The tests that reach a verdict, each from the errors of one nonce after the other.

A node is honest if it is one of the honest populations, so what convicts speaks against all of
them. Those of errors beside our own run (``populations``) are in ``error_judges``, the exact one in
``verification``.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.codec import to_float16
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.counting import (
    SequentialResult,
    SequentialTest,
    check_inside,
    judge,
    power,
)
from proofserve.reports import FieldsOf

T = TypeVar("T")
Vector = NDArray[np.float32]
# Vectors by nonce, float32 [width] each, and a function that computes them.
Vectors = Mapping[int, Vector]
Recompute = Callable[[Sequence[int]], Vectors]
# The numbers behind an opinion, by their names.
Figures = Mapping[str, float | bool | str]


@dataclass(frozen=True, slots=True)
class BankRun:
    """A run of a validator: a suspect's ``weights``, None for the published ones, in ``kernels``.

    These are a name of emulated ones, None for exact arithmetic. ``order`` says in which order they
    add up, None as this machine does.
    """

    weights: str | None = None
    kernels: str | None = None
    order: int | None = None

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.weights or "published", self.kernels)))


@dataclass(frozen=True, slots=True)
class Variant:
    """How a server differs from one on a single rank with vLLM's own operations.

    One that compiles has PyTorch's for proofs, and a compiled graph for chat. On processors with
    AVX2 alone, ranks add up by PyTorch's gloo.
    """

    operations: Literal["vLLM", "PyTorch", "compiled"] = "vLLM"
    ranks: int = 1
    by_gloo: bool = False


PUBLISHED: Final = BankRun()
# The validator's own honest run, in the dtype that nodes serve.
OWN: Final = BankRun(kernels="our own rounding")


def as_sent(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """``vector`` as a validator gets it: rounded to the float16 of the wire (protocol B.4)."""
    return to_float16(vector).astype(np.float32)


class KernelBank(Protocol):
    """Suspected weights by ``names``, and how each would move the results; and honest kernels.

    ``references`` are those of ``kernels`` that servers have, ``variants`` the names of each of
    them in other servers of its machine. Where kernels ``round_activations`` to 8 bits, lies are
    shorter than a tenth of their errors.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def kernels(self) -> Sequence[str]: ...

    @property
    def references(self) -> Sequence[str]: ...

    @property
    def variants(self) -> Mapping[str, Mapping[Variant, str]]: ...

    @property
    def round_activations(self) -> bool: ...

    def expect(self, runs: Mapping[BankRun, Sequence[int]]) -> None:
        """What will be asked for next: a bank may compute it together."""

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        """The suspect's vectors less the published model's, float32 [width] each."""

    def errors(self, run: BankRun, nonces: Sequence[int]) -> Vectors:
        """By how much a run differs from the published vectors on the wire, float32 [width]."""


# The chances of a wrong verdict, unless options say otherwise.
ALPHA, BETA = 1e-6, 1e-3
# By default a cleared node has not forged three tenths of its nonces, which 23 typical ones exclude
# (a tenth 128), nor does it keep this much, or less, of the footprint in all of them.
SHARE, KEPT_IN_ALL = 0.3, 0.86
# Of vectors with fewer values cosines spread so far that more would take hundreds of nonces.
_MANY, _KEPT_OF_FEW = 64, 0.8


@dataclass(frozen=True, slots=True)
class Chances:
    """The largest chances of one test to convict an honest node, and to clear a fraud.

    No test clears a fraud that forges at least ``share`` of its nonces, or keeps at most ``kept``
    of the footprint on average; others save too little. Raises ProtocolError for a chance or share
    out of range.
    """

    alpha: float = ALPHA
    beta: float = BETA
    share: float = SHARE
    kept: float = KEPT_IN_ALL

    def of_vectors(self, width: int) -> "Chances":
        """The same for vectors of ``width`` values, of which few say less."""
        return self if width >= _MANY else replace(self, kept=_KEPT_OF_FEW)

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


def result_of(*, convicts: bool = False, clears: bool = False) -> SequentialResult:
    """What a test says that convicts, or else clears."""
    if convicts:
        return SequentialResult.FRAUD
    return SequentialResult.HONEST if clears else SequentialResult.UNDECIDED


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one test found after ``nonces``; ``text`` says it in words, for a reader."""

    test: str
    result: SequentialResult
    nonces: int
    text: str
    figures: Figures


# As a report has it.
OpinionRecord = Annotated[dict[str, Any], FieldsOf(Opinion)]


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
    def result(self) -> SequentialResult:
        """So far. UNEXPLAINED says that the node has none of the known honest kernels."""

    def opinion(self) -> Opinion:
        result = self.result()
        text, figures = self._says(result)
        return Opinion(self.name, result, self.nonces, text, figures)

    @abstractmethod
    def _says(self, result: SequentialResult) -> tuple[str, Figures]:
        """What the test found, in words and in numbers."""


def evidence_text(log_evidence: float) -> str:
    power_of_ten = log_evidence / math.log(10)
    return f"E = {10**power_of_ten:.2g}" if abs(power_of_ten) < 300 else f"E = 1e{power_of_ten:.0f}"


def few(names: Sequence[str], most: int = 3) -> str:
    """The first of ``names``, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


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

    def result(self) -> SequentialResult:
        return self._found()[0]

    def _says(self, _result: SequentialResult) -> tuple[str, Figures]:
        _, name, figure = self._found()
        text = f"{self._mismatches} mismatches, {name} {figure:.3g}"
        return text, {name.replace(" ", "_").replace("-", "_"): figure, **asdict(self._rule.test)}

    def _found(self) -> tuple[SequentialResult, str, float]:
        """The result, and the name and value of the figure behind it."""
        test = self._rule.test
        if self._rule.sequential:
            ratio = math.exp(test.log_ratio(self._mismatches, self.nonces))
            return test.result(self._mismatches, self.nonces), "likelihood ratio", ratio
        judged = judge(self._mismatches, self.nonces, test.p_honest, test.alpha)
        result = SequentialResult.UNDECIDED
        if self.nonces == self._sample:
            if judged.fraud_detected:
                result = SequentialResult.FRAUD
            # With too few nonces the test would also miss too many frauds.
            elif power(self.nonces, test.p_honest, test.alpha, test.p_fraud) >= 1 - test.beta:
                result = SequentialResult.HONEST
        return result, "p-value", judged.p_value
