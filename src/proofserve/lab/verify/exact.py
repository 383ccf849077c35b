"""The test ``exact``: an engine like the node's publishes the very same vectors, bit for bit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from proofserve.lab.verify.judges import Chances, Finding, Recompute, Standing, result_of
from proofserve.lab.verify.verification import Verification
from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.sequential import SequentialResult

# What an engine says of itself and rounds by, in the words of ``KernelFacts``.
_ROUNDS_BY: Final = ("engine", "processor", "torch", "dtype", "kv_dtype", "attention", "ranks")


@dataclass(frozen=True, slots=True)
class TrustedEngine:
    """An engine that serves the published checkpoint, as a node would.

    ``vectors`` are as it publishes them: numbers of float16. ``facts`` are the fields of
    ``KernelFacts``, None for what it does not say.
    """

    name: str
    vectors: Recompute
    weights_digest: str | None
    facts: Mapping[str, object]


class ExactJudge:
    """Counts the claims that are the trusted engine's vector, value by value in float16.

    If all are, they clear the node: whatever computed them, the published weights would have given
    the same. One that differs says nothing, because honest engines differ, and ends the test: what
    the node did in the other nonces is then unknown. So it neither convicts nor refutes.
    """

    name = "exact"
    clears = True

    def __init__(
        self, chances: Chances, ours: Mapping[str, object], theirs: Mapping[str, object] | None
    ) -> None:
        self.needed = nonces_needed(chances)
        self._share = chances.share
        self._facts = ours, theirs
        self._equal = self._other = self._without = 0

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        pass

    def add(self, error: ClaimError) -> None:
        if error.error is None:
            self._without += 1
        elif error.error.any():
            self._other += 1
        else:
            self._equal += 1

    def standings(self) -> list[Standing]:
        cleared = self._equal == self._nonces and self._equal >= self.needed
        return [Standing(0.0, refutes=False, convicts=False, clears=cleared)]

    def finding(self, population: int) -> Finding:  # noqa: ARG002 - it knows none
        (standing,) = self.standings()
        figures: dict[str, float | str] = {
            **{"equal": self._equal, "other_bits": self._other, "no_vector": self._without}
        }
        if standing.clears:
            figures["excluded_share"] = self._share
        return Finding(self.name, result_of(standing), self._nonces, self._text(), figures)

    @property
    def _nonces(self) -> int:
        return self._equal + self._other + self._without

    def _text(self) -> str:
        of = f"of {self._nonces} nonces"
        parts = []
        if self._other:
            parts.append(
                f"other bits in {self._other} {of}: the engines differ{self._differences()}"
            )
        if self._without:
            parts.append(f"no vector in {self._without} {of}")
        if parts:
            return ", and ".join(parts)
        few = "" if self._equal >= self.needed else f", {self.needed} are needed"
        return f"equal bits in {self._equal} {of}{few}"

    def _differences(self) -> str:
        """In what, by what both say of themselves."""
        ours, theirs = self._facts
        if theirs is None:
            return ""
        known = [(each, theirs.get(each), ours.get(each)) for each in _ROUNDS_BY]
        found = [
            f"{name} {there} there, {here} here"
            for name, there, here in known
            if None not in {there, here} and there != here
        ]
        return f" ({'; '.join(found)})" if found else ", and say the same of themselves"


def nonces_needed(chances: Chances) -> int:
    """After so many equal ones, a node that forges the share is cleared with beta at most.

    A sample of n nonces has none of those with a chance of (1 - share)^n.
    """
    if chances.share == 1.0:
        return 1
    return math.ceil(chances.clears_at / -math.log1p(-chances.share))


def leaves_open(exact: Verification) -> bool:
    """Whether other tests have to judge: the engines differ, or a vector is missing.

    If all bits agree in too few nonces, the others would judge the trusted engine.
    """
    if exact.verdict is not SequentialResult.UNDECIDED:
        return False
    (finding,) = exact.findings
    return finding.figures["equal"] != finding.nonces
