"""Simulated verifications of recorded vectors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from proofserve.lab.calibrate.noise import Noise, Pairs
from proofserve.lab.client.progress import NoProgress, Progress
from proofserve.lab.verify.counting import CountJudge, CountRule
from proofserve.lab.verify.judges import Chances, Judge, ScaleJudge
from proofserve.lab.verify.verification import decide
from proofserve.protocol.codec import encode
from proofserve.protocol.verdict.comparison import Claim, ClaimError, claim_errors
from proofserve.protocol.verdict.counting import sample_size
from proofserve.protocol.verdict.scale import fitted
from proofserve.protocol.verdict.sequential import SequentialResult, SequentialTest

RUNS = 1000
# The defaults of ``proofserve verify``.
P_FRAUD, ALPHA, BETA = 0.5, 1e-6, 1e-3
# The largest sample that is simulated.
MOST_NONCES = 200


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """Verifications by one test, of up to ``nonces`` each; ``make`` makes the judge of one."""

    test: str
    nonces: int
    make: Callable[[], Judge]


@dataclass(frozen=True, slots=True)
class VerificationTrial:
    """The verdicts of simulated verifications by one test, and how many nonces each recomputed.

    Each drew ``nonces`` with replacement by ``seed``.
    """

    test: str
    nonces: int
    seed: int
    verdicts: tuple[SequentialResult, ...]
    nonces_used: tuple[int, ...]

    @property
    def median_nonces(self) -> float:
        return float(np.median(self.nonces_used))

    def count(self, verdict: SequentialResult) -> int:
        return self.verdicts.count(verdict)


def simulated_trials(
    title: str, pairs: Pairs, found: Noise, progress: Progress
) -> tuple[VerificationTrial, ...]:
    """Verify the honest ``pairs`` ``RUNS`` times each: by the count in both forms, and by scale.

    Equal vectors have no scale, so there the last one is left out.
    """
    test = SequentialTest(found.rate, P_FRAUD, ALPHA, BETA)
    enough = sample_size(found.rate, ALPHA, P_FRAUD, 1.0 - BETA, MOST_NONCES) or MOST_NONCES
    # At the quantile honest vectors mismatch as often as the test allows.
    one_by_one, at_once = CountRule(test, found.quantile), CountRule(test, found.quantile, False)
    plans = [
        TrialPlan("sequential", MOST_NONCES, lambda: CountJudge(one_by_one, MOST_NONCES)),
        TrialPlan("fixed", enough, lambda: CountJudge(at_once, enough)),
    ]
    if found.distances.all():
        fit, chances = fitted(found.distances), Chances(ALPHA, BETA)
        plans.append(TrialPlan("scale", MOST_NONCES, lambda: ScaleJudge(fit, chances)))
    trials = []
    for plan in plans:
        progress.step(f"{title}: simulating verifications, {plan.test}", RUNS)
        trials.append(simulate(pairs, plan, RUNS, progress))
    return tuple(trials)


def simulate(
    pairs: Pairs, plan: TrialPlan, runs: int, progress: Progress, seed: int = 0
) -> VerificationTrial:
    """Verify ``pairs.one``, claimed, against ``pairs.other``, recomputed, as ``verify`` does.

    Each run draws its own sample of the recorded nonces, independently of the other runs.
    """
    count, width = pairs.one.shape
    claims = [Claim(row, text) for row, text in enumerate(encode(pairs.one))]
    recorded = claim_errors(range(count), dict(enumerate(pairs.other)), claims, width)

    def errors_of(rows: Sequence[int]) -> list[ClaimError]:
        return [recorded[row] for row in rows]

    draw = np.random.default_rng(seed)
    verdicts, used = [], []
    for _ in range(runs):
        rows = draw.integers(0, count, plan.nonces).tolist()
        outcome = decide(rows, errors_of, plan.nonces, [plan.make()], NoProgress())
        verdicts.append(outcome.verdict)
        used.append(outcome.nonces_used)
        progress.advance()
    return VerificationTrial(plan.test, plan.nonces, seed, tuple(verdicts), tuple(used))
