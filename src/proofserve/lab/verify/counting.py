"""The network's test: how many claims lie beyond a threshold."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from proofserve.lab.verify.judges import Finding, Standing
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.counting import judge, power
from proofserve.protocol.verdict.sequential import SequentialResult, SequentialTest


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
            raise ProtocolError(
                "dist_threshold", f"{self.dist_threshold} is not a finite number from 0 on"
            )

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


class CountJudge:
    """Counts mismatches among the ``sample`` nonces of a verification."""

    clears = True

    def __init__(self, rule: CountRule, sample: int) -> None:
        self._rule = rule
        # A finding is asked for after each nonce, and `asdict` would take most of its time.
        self._chosen = asdict(rule.test)
        self._sample = sample
        self._nonces = 0
        self._mismatches = 0

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        pass

    def add(self, error: ClaimError) -> None:
        self._nonces += 1
        # The comparison of a validator is in float32 (protocol B.4).
        far = np.float32(error.distance) > np.float32(self._rule.dist_threshold)
        self._mismatches += bool(far)

    def standings(self) -> list[Standing]:
        result = self._result()[0]
        convicts = result is SequentialResult.FRAUD
        return [Standing(0.0, convicts, convicts, result is SequentialResult.HONEST)]

    def finding(self, population: int) -> Finding:  # noqa: ARG002 - the count knows none
        result, name, figure = self._result()
        text = f"{self._mismatches} mismatches, {name} {figure:.3g}"
        figures = {name.replace(" ", "_").replace("-", "_"): figure, **self._chosen}
        return Finding("count", result, self._nonces, text, figures)

    def _result(self) -> tuple[SequentialResult, str, float]:
        return self._sequential() if self._rule.sequential else self._fixed()

    def _sequential(self) -> tuple[SequentialResult, str, float]:
        test = self._rule.test
        ratio = math.exp(test.log_ratio(self._mismatches, self._nonces))
        return test.result(self._mismatches, self._nonces), "likelihood ratio", ratio

    def _fixed(self) -> tuple[SequentialResult, str, float]:
        test = self._rule.test
        judged = judge(self._mismatches, self._nonces, test.p_honest, test.alpha)
        result = SequentialResult.UNDECIDED
        if self._nonces == self._sample:
            # With too few nonces the test would also miss too many frauds.
            strong = power(self._nonces, test.p_honest, test.alpha, test.p_fraud) >= 1 - test.beta
            result = SequentialResult.HONEST if strong else result
            result = SequentialResult.FRAUD if judged.fraud_detected else result
        return result, "p-value", judged.p_value
