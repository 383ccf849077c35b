"""Verifications of real vectors: an honest node in bfloat16, one with weights of 4 bits."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.lab.calibrate.noise import Pairs, noise
from proofserve.lab.calibrate.simulation import TrialPlan, VerificationTrial, simulate
from proofserve.lab.client.progress import NoProgress
from proofserve.lab.verify.claimed import ClaimedArtifacts
from proofserve.lab.verify.counting import CountJudge, CountRule
from proofserve.lab.verify.judges import Chances, ScaleJudge, Vectors
from proofserve.lab.verify.verification import Recomputation, Verification, verify
from proofserve.protocol.codec import encode, to_float16
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import draw
from proofserve.protocol.schemes import scheme
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.scale import fitted
from proofserve.protocol.verdict.sequential import SequentialResult, SequentialTest
from proofserve.rounds.records import Workload
from support.four_bits import engine_of, one_thread

WORK = Workload(scheme("artifact-v1", k_dim=12), Block("block", 7), "key", seq_len=16)
NONCES = range(64)
# The rate that so few nonces can tell, for the threshold of an honest node.
RATE = 0.06
DEFAULTS = SequentialTest(p_honest=0.001, p_fraud=0.5)
RUNS = 1000


@dataclass(frozen=True)
class Recorded:
    """What each engine computed: float32 [64, 12], as the wire has it."""

    validator: NDArray[np.float32]
    honest: NDArray[np.float32]
    forged: NDArray[np.float32]

    @property
    def truth(self) -> Pairs:
        return Pairs(self.honest, self.validator)

    @property
    def fraud(self) -> Pairs:
        return Pairs(self.forged, self.validator)

    @property
    def threshold(self) -> float:
        return noise(self.truth.distances, RATE).dist_threshold


@pytest.fixture(scope="module")
def recorded(tiny: Path) -> Recorded:
    with one_thread():
        values = [
            engine_of(tiny, dtype, four_bits).compute(WORK, NONCES).values
            for dtype, four_bits in (("float32", False), ("bfloat16", False), ("bfloat16", True))
        ]
    return Recorded(*(to_float16(each).astype(np.float32) for each in values))


def test_four_bits_are_far_beyond_rounding(recorded: Recorded) -> None:
    assert recorded.fraud.distances.min() > 3 * recorded.truth.distances.max()


@pytest.mark.parametrize("forged", [False, True])
def test_over_100_seeds_few_nonces_are_enough(recorded: Recorded, forged: bool) -> None:
    pairs = recorded.fraud if forged else recorded.truth
    claims = tuple(Claim(nonce, text) for nonce, text in enumerate(encode(pairs.one)))
    claimed = ClaimedArtifacts("block", "key", tuple(NONCES), claims, 12, 16)

    def recompute(nonces: object) -> Vectors:
        return {nonce: pairs.other[nonce] for nonce in nonces}  # type: ignore[attr-defined]

    rule = CountRule(DEFAULTS, recorded.threshold)
    ours = Recomputation(recompute, 12, 8)

    def judged(seed: int) -> Verification:
        sample = draw(claimed.nonces, str(seed))
        return verify(claimed, sample, ours, [CountJudge(rule, len(sample))], NoProgress())

    outcomes = [judged(seed) for seed in range(100)]
    expected = SequentialResult.FRAUD if forged else SequentialResult.HONEST
    assert {outcome.verdict for outcome in outcomes} == {expected}
    assert float(np.median([outcome.nonces_used for outcome in outcomes])) <= 10


@pytest.mark.parametrize("sequential", [True, False])
def test_1000_verifications_have_no_wrong_verdict(recorded: Recorded, sequential: bool) -> None:
    rule = CountRule(DEFAULTS, recorded.threshold, sequential)
    plan = TrialPlan("count", 18, lambda: CountJudge(rule, 18))
    honest = simulate(recorded.truth, plan, RUNS, NoProgress())
    forged = simulate(recorded.fraud, plan, RUNS, NoProgress())
    assert honest.count(SequentialResult.HONEST) == forged.count(SequentialResult.FRAUD) == RUNS
    assert max(honest.median_nonces, forged.median_nonces) <= (10 if sequential else 18)


def test_the_scale_test_needs_fewer_nonces_and_no_threshold(recorded: Recorded) -> None:
    fit, chances = fitted(recorded.truth.distances), Chances(1e-6, 1e-3)
    plan = TrialPlan("scale", 18, lambda: ScaleJudge(fit, chances))
    honest = simulate(recorded.truth, plan, RUNS, NoProgress())
    forged = simulate(recorded.fraud, plan, RUNS, NoProgress())
    assert honest.count(SequentialResult.FRAUD) == 0
    assert forged.count(SequentialResult.FRAUD) == RUNS
    assert forged.median_nonces <= 6


def most(chance: float) -> float:
    """So often an event of that chance happens in all runs: three standard deviations."""
    return RUNS * chance + 3 * (RUNS * chance * (1 - chance)) ** 0.5


def test_errors_are_as_rare_as_stated_where_they_happen_at_all(recorded: Recorded) -> None:
    """At thresholds where honest and forged vectors mismatch just as often as the test allows."""
    bound = 0.05
    honest_at = float(np.quantile(recorded.truth.distances, 0.75, method="inverted_cdf"))
    forged_at = float(np.median(recorded.fraud.distances))
    test = SequentialTest(p_honest=0.25, p_fraud=0.5, alpha=bound, beta=bound)

    def trial(pairs: Pairs, threshold: float) -> VerificationTrial:
        rule = CountRule(test, threshold)
        return simulate(
            pairs, TrialPlan("count", 200, lambda: CountJudge(rule, 200)), RUNS, NoProgress()
        )

    honest = trial(recorded.truth, honest_at)
    forged = trial(recorded.fraud, forged_at)
    assert 0 < honest.count(SequentialResult.FRAUD) <= most(bound)
    assert 0 < forged.count(SequentialResult.HONEST) <= most(bound)
    assert honest.count(SequentialResult.UNDECIDED) == forged.count(SequentialResult.UNDECIDED) == 0


def test_the_seed_decides_what_is_drawn(recorded: Recorded) -> None:
    rule = CountRule(
        SequentialTest(0.25, 0.5, 0.05, 0.05), float(np.median(recorded.truth.distances))
    )

    def used(seed: int) -> tuple[int, ...]:
        plan = TrialPlan("count", 100, lambda: CountJudge(rule, 100))
        return simulate(recorded.truth, plan, 20, NoProgress(), seed).nonces_used

    assert used(1) == used(1) != used(2)
