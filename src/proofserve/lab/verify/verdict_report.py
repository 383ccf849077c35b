"""What ``verify`` says of a verification: lines for a reader, and a record for a program."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from proofserve.lab.verify.claimed import ClaimedArtifacts
from proofserve.lab.verify.counting import CountRule
from proofserve.lab.verify.judges import PairedJudge, ScaleJudge
from proofserve.lab.verify.verification import Verification
from proofserve.protocol.verdict.comparison import Mismatch
from proofserve.protocol.verdict.sequential import SequentialResult

# The most mismatches that the lines name.
SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class VerdictReport:
    """``rule`` is that of the count, None if it was not run; ``origin`` that of the threshold.

    ``share`` is the least share of forged nonces that a cleared node would have shown.
    """

    outcome: Verification
    claimed: ClaimedArtifacts
    seed: str
    rule: CountRule | None
    origin: str
    share: float

    def lines(self) -> Iterator[str]:
        outcome = self.outcome
        total = len(self.claimed.nonces)
        yield f"{outcome.nonces_used} of {total} nonces recomputed (seed {self.seed})"
        for finding in outcome.findings:
            yield f"  {finding.test:9} {finding.result}: {finding.text}"
        mismatches = self._mismatches()
        for mismatch in mismatches[:SHOWN]:
            far = "" if mismatch.distance is None else f" by {mismatch.distance:.4f}"
            why = f"{mismatch.reason}{far} {mismatch.detail}"
            yield f"  nonce {mismatch.nonce}: {why}".rstrip()
        if (more := len(mismatches) - SHOWN) > 0:
            yield f"  and {more} more"
        if self.rule is not None:
            yield self.rule.description
        elif outcome.verdict is SequentialResult.HONEST and self._sizes_are_judged:
            yield self._excluded()
        yield f"Honest distances: {self.origin}."

    def record(self) -> dict[str, object]:
        outcome, rule = self.outcome, self.rule
        counted = {} if rule is None else {"rule": rule.description, "count": asdict(rule)}
        return {
            "verdict": outcome.verdict,
            "nonces_used": outcome.nonces_used,
            "nonces_claimed": len(self.claimed.nonces),
            "findings": [asdict(finding) for finding in outcome.findings],
            "mismatches": [asdict(mismatch) for mismatch in self._mismatches()],
            "distances": {e.nonce: e.distance for e in outcome.errors if e.broken is None},
            "seed": self.seed,
            "block_hash": self.claimed.block_hash,
            "public_key": self.claimed.public_key,
            "threshold_from": self.origin,
            **counted,
        }

    @property
    def _sizes_are_judged(self) -> bool:
        return not {ScaleJudge.name, PairedJudge.name}.isdisjoint(
            finding.test for finding in self.outcome.findings
        )

    def _excluded(self) -> str:
        if self.share < 1.0:
            return f"A node that forges {self.share:.1%} of its nonces or more would have shown."
        return "A node that forges all nonces would have shown; for a tenth give --share 0.1."

    def _mismatches(self) -> tuple[Mismatch, ...]:
        return self.outcome.mismatches(self.rule.dist_threshold if self.rule else None)
