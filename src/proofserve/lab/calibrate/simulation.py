"""Simulated verifications of recorded vectors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proofserve.lab.calibrate.noise import Noise, Pairs
from proofserve.lab.client.progress import NoProgress, Progress
from proofserve.lab.verify.claimed import ClaimedArtifacts
from proofserve.lab.verify.counting import CountJudge, CountRule
from proofserve.lab.verify.judges import Vectors
from proofserve.lab.verify.verification import Recomputation, Verification, verify
from proofserve.protocol.codec import encode
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.counting import sample_size
from proofserve.protocol.verdict.sequential import SequentialResult, SequentialTest

RUNS = 1000
# The defaults of ``proofserve verify``.
P_FRAUD, ALPHA, BETA = 0.5, 1e-6, 1e-3
# The largest sample that is simulated.
MOST_NONCES = 200


@dataclass(frozen=True, slots=True)
class VerificationTrial:
    """The verdicts of simulated verifications by one rule, and how many nonces each recomputed.

    Each drew ``nonces`` with replacement by ``seed``.
    """

    rule: CountRule
    nonces: int
    seed: int
    verdicts: tuple[SequentialResult, ...]
    nonces_used: tuple[int, ...]

    @property
    def name(self) -> str:
        return "sequential" if self.rule.sequential else "fixed"

    @property
    def median_nonces(self) -> float:
        return float(np.median(self.nonces_used))

    def count(self, verdict: SequentialResult) -> int:
        return self.verdicts.count(verdict)


def simulated_trials(
    title: str, pairs: Pairs, found: Noise, progress: Progress
) -> tuple[VerificationTrial, ...]:
    """Verify the honest ``pairs`` by the sequential and by the fixed test, ``RUNS`` times each."""
    test = SequentialTest(found.rate, P_FRAUD, ALPHA, BETA)
    enough = sample_size(found.rate, ALPHA, P_FRAUD, 1.0 - BETA, MOST_NONCES) or MOST_NONCES
    trials = []
    for sequential, count in ((True, MOST_NONCES), (False, enough)):
        # At the quantile honest vectors mismatch as often as the test allows.
        rule = CountRule(test, found.quantile, sequential)
        kind = "sequential" if sequential else "fixed"
        progress.step(f"{title}: simulating verifications, {kind}", RUNS)
        trials.append(simulate(pairs, rule, RUNS, count, progress))
    return tuple(trials)


def simulate(
    pairs: Pairs, rule: CountRule, runs: int, nonces: int, progress: Progress, seed: int = 0
) -> VerificationTrial:
    """Verify ``pairs.one``, claimed, against ``pairs.other``, recomputed, by ``verify`` itself.

    Each run draws its own sample of the recorded nonces, independently of the other runs.
    """
    texts = encode(pairs.one)
    draw = np.random.default_rng(seed)
    verdicts, used = [], []
    for _ in range(runs):
        rows = draw.integers(0, len(texts), nonces).tolist()
        outcome = _verified(pairs, texts, rows, rule)
        verdicts.append(outcome.verdict)
        used.append(outcome.nonces_used)
        progress.advance()
    return VerificationTrial(rule, nonces, seed, tuple(verdicts), tuple(used))


def _verified(
    pairs: Pairs, texts: Sequence[str], rows: Sequence[int], rule: CountRule
) -> Verification:
    def recorded(nonces: Sequence[int]) -> Vectors:
        return {nonce: pairs.other[rows[nonce]] for nonce in nonces}

    every = tuple(range(len(rows)))
    claims = tuple(Claim(nonce, texts[row]) for nonce, row in enumerate(rows))
    claimed = ClaimedArtifacts("simulated", "simulated", every, claims)
    ours = Recomputation(recorded, pairs.one.shape[1], at_once=len(rows))
    return verify(claimed, every, ours, [CountJudge(rule, len(rows))], NoProgress())
