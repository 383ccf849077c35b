"""Simulated verifications of recorded vectors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proofserve.lab.calibrate.noise import Noise, Pairs
from proofserve.lab.client.progress import NoProgress, Progress
from proofserve.lab.verify.claimed import ClaimedArtifacts
from proofserve.lab.verify.verification import Vectors, VerificationRule, verify
from proofserve.protocol.codec import encode
from proofserve.protocol.comparison import Claim
from proofserve.protocol.sequential import SequentialResult, SequentialTest
from proofserve.protocol.statistics import sample_size

RUNS = 1000
# The defaults of ``proofserve verify``.
P_FRAUD, ALPHA, BETA = 0.5, 1e-6, 1e-3
# The largest sample that is simulated.
MOST_NONCES = 200


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The verdicts of the verifications, and how many nonces each recomputed."""

    findings: tuple[SequentialResult, ...]
    nonces_used: tuple[int, ...]

    def count(self, finding: SequentialResult) -> int:
        """How many verifications had this verdict."""
        return self.findings.count(finding)

    @property
    def median_nonces(self) -> float:
        """The median number of nonces that were recomputed."""
        return float(np.median(self.nonces_used))


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """``runs`` verifications of ``nonces`` each, drawn with replacement by ``seed``."""

    runs: int
    nonces: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class VerificationTrial:
    """One rule, the verifications that were simulated by it, and their verdicts."""

    rule: VerificationRule
    plan: SimulationPlan
    outcomes: Outcomes

    @property
    def name(self) -> str:
        """The kind of test."""
        return "sequential" if self.rule.sequential else "fixed"


def simulated_trials(
    title: str, pairs: Pairs, found: Noise, progress: Progress
) -> tuple[VerificationTrial, ...]:
    """Verify the honest ``pairs`` by the sequential and by the fixed test, ``RUNS`` times each."""
    test = SequentialTest(found.rate, P_FRAUD, ALPHA, BETA)
    enough = sample_size(found.rate, ALPHA, P_FRAUD, 1.0 - BETA, MOST_NONCES) or MOST_NONCES
    trials = []
    for sequential, count in ((True, MOST_NONCES), (False, enough)):
        # At the quantile honest vectors mismatch as often as the test allows.
        rule, plan = VerificationRule(test, found.quantile, sequential), SimulationPlan(RUNS, count)
        kind = "sequential" if sequential else "fixed"
        progress.step(f"{title}: simulating verifications, {kind}", RUNS)
        trials.append(VerificationTrial(rule, plan, simulate(pairs, rule, plan, progress)))
    return tuple(trials)


def simulate(
    pairs: Pairs, rule: VerificationRule, plan: SimulationPlan, progress: Progress
) -> Outcomes:
    """Verify ``pairs.one``, claimed, against ``pairs.other``, recomputed, by ``verify`` itself.

    Each run draws recorded nonces anew, so that given these the runs are independent.
    """
    texts = encode(pairs.one)
    draw = np.random.default_rng(plan.seed)
    findings, used = [], []
    for _ in range(plan.runs):
        rows = draw.integers(0, len(texts), plan.nonces).tolist()
        outcome = verify(
            _claimed([texts[row] for row in rows], pairs.one.shape[1]),
            range(plan.nonces),
            _Recorded(pairs, rows).vectors,
            rule,
            NoProgress(),
        )
        findings.append(outcome.verdict)
        used.append(outcome.nonces_used)
        progress.advance()
    return Outcomes(tuple(findings), tuple(used))


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recomputation from the record: the vector of nonce i is row ``rows[i]``."""

    pairs: Pairs
    rows: Sequence[int]

    def vectors(self, nonces: Sequence[int]) -> Vectors:
        return {nonce: self.pairs.other[self.rows[nonce]] for nonce in nonces}


def _claimed(texts: Sequence[str], k_dim: int) -> ClaimedArtifacts:
    claims = tuple(Claim(nonce, text) for nonce, text in enumerate(texts))
    return ClaimedArtifacts("simulated", "simulated", tuple(range(len(texts))), claims, k_dim)
