"""What ``verify`` says of a verification: lines for a reader, and a record for a program."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Final

from proofserve.lab.verify.claimed import ClaimedArtifacts
from proofserve.lab.verify.counting import CountRule
from proofserve.lab.verify.verification import Verification
from proofserve.protocol.verdict.comparison import Mismatch
from proofserve.protocol.verdict.sequential import SequentialResult

# The most mismatches that the lines name.
SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class VerdictReport:
    """``rule`` is that of the count, None if it was not run; ``origin`` that of the honest figures.

    ``kernels`` are the honest populations in their order, empty without a calibration. A node that
    forges is cleared with a chance of ``beta`` at most, an honest one is convicted with ``alpha``.
    """

    outcome: Verification
    claimed: ClaimedArtifacts
    seed: str
    rule: CountRule | None
    origin: str
    kernels: tuple[str, ...]
    alpha: float
    beta: float

    def after(self, earlier: "VerdictReport") -> "VerdictReport":
        """This one, with the findings of a test that was run before and decided nothing."""
        findings = (*earlier.outcome.findings, *self.outcome.findings)
        return replace(self, outcome=replace(self.outcome, findings=findings))

    def lines(self) -> Iterator[str]:
        outcome = self.outcome
        total = len(self.claimed.nonces)
        used = f"{outcome.nonces_used} of {total} nonces recomputed"
        yield f"{used} (to reproduce this sample: --seed {self.seed})"
        yield f"Block {self.claimed.block_hash}, key {self.claimed.public_key}."
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
        if self.kernels:
            yield f"Closest honest kernel: {self.closest}."
        if outcome.verdict is SequentialResult.UNEXPLAINED:
            yield self.what_to_measure
        if (share := self._excluded_share()) is not None:
            yield (
                f"A node that forges {share:.0%} of its nonces or more would have been cleared with"
                f" a chance of {self.beta:g} at most."
            )
        yield f"Honest nodes: {self.origin}."

    @property
    def closest(self) -> str | None:
        """The honest population that explains the node best; None without a calibration."""
        return self.kernels[self.outcome.closest] if self.kernels else None

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
            "closest": self.closest,
            "excluded_share": self._excluded_share(),
            "alpha": self.alpha,
            "beta": self.beta,
            **counted,
        }

    @property
    def what_to_measure(self) -> str:
        """Why there is no verdict, and which command ends that."""
        if not self.kernels:
            return (
                "No verdict: what points to suspected weights may be honest rounding of this model."
                " Measure honest kernels: proofserve calibrate noise MODEL --out FILE"
            )
        return (
            "No verdict: no kernel of the calibration explains these errors, and no fraud that is"
            " known. If a node of this kind is trusted, measure it: proofserve calibrate noise"
            " MODEL --other URL --add FILE --out FILE"
        )

    def _excluded_share(self) -> float | None:
        """The least share of forged nonces that the verdict excludes, if it clears."""
        if self.outcome.verdict is not SequentialResult.HONEST:
            return None
        found = (finding.figures for finding in self.outcome.findings)
        shares = [float(each["excluded_share"]) for each in found if "excluded_share" in each]
        return min(shares, default=None)

    def _mismatches(self) -> tuple[Mismatch, ...]:
        return self.outcome.mismatches(self.rule.dist_threshold if self.rule else None)
