"""The scale test and the paired test, and how much of a fraud an honest verdict excludes."""

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.lab.verify.judges import Chances, PairedJudge, ScaleJudge, Vectors
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.comparison import ClaimError, Mismatch, Reason
from proofserve.protocol.verdict.scale import fitted
from proofserve.protocol.verdict.sequential import SequentialResult

Floats = NDArray[np.float64]
CHANCES = Chances(1e-6, 1e-3)
CALIBRATED, JUDGED, MOST = 1000, 400, 200


def sensitivity(seed: int, count: int) -> Floats:
    """How much rounding weighs in each nonce: the same for every engine."""
    return 0.01 * np.exp(0.5 * np.random.default_rng(seed).normal(size=count))


def kernels(seed: int, count: int) -> Floats:
    """How much further apart than the validator's own run another kernel is."""
    return np.exp(0.1 * np.random.default_rng(seed).normal(size=count))


DISTANCES = fitted(sensitivity(0, CALIBRATED) * kernels(1, CALIBRATED))
RATIOS = fitted(kernels(1, CALIBRATED))
OWN = sensitivity(2, JUDGED)


def own(nonces: object) -> Vectors:
    return {n: np.array([OWN[n], 0.0], np.float32) for n in nonces}  # type: ignore[attr-defined]


def judge_of(name: str, chances: Chances = CHANCES) -> ScaleJudge:
    paired = name == "paired"
    return PairedJudge(own, RATIOS, chances) if paired else ScaleJudge(DISTANCES, chances)


def judged(judge: ScaleJudge, distances: Floats, start: int = 0) -> tuple[SequentialResult, int]:
    for nonce, distance in enumerate(distances[:MOST], start):
        error = ClaimError(nonce, np.array([0.0, distance], np.float32))
        judge.prepare([error])
        judge.add(error)
        if (result := judge.finding().result) is not SequentialResult.UNDECIDED:
            return result, nonce + 1 - start
    return SequentialResult.UNDECIDED, MOST


@pytest.mark.parametrize("name", ["scale", "paired"])
@pytest.mark.parametrize("noise", [1.0, 1.4])
def test_honest_nodes_are_never_convicted(name: str, noise: float) -> None:
    for seed in range(100):
        result, _ = judged(judge_of(name), noise * OWN * kernels(10 + seed, JUDGED), 0)
        assert result is not SequentialResult.FRAUD
        assert result is SequentialResult.HONEST or noise > 1


def test_a_ratio_to_our_own_rounding_tells_more_than_a_distance() -> None:
    took = {}
    for name in ("scale", "paired"):
        ends = [judged(judge_of(name), 2.1 * OWN * kernels(50 + s, JUDGED)) for s in range(20)]
        assert {result for result, _ in ends} == {SequentialResult.FRAUD}
        took[name] = float(np.median([nonces for _, nonces in ends]))
    assert 2 * took["paired"] < took["scale"]


@pytest.mark.parametrize("name", ["scale", "paired"])
def test_claims_without_a_vector_are_infinitely_far(name: str) -> None:
    judge = judge_of(name)
    for nonce in range(3):
        error = ClaimError(nonce, None, Mismatch(nonce, Reason.MISSING))
        judge.prepare([error])
        judge.add(error)
    assert judge.finding().result is SequentialResult.FRAUD


@pytest.mark.parametrize("name", ["scale", "paired"])
def test_a_smaller_share_takes_longer_and_excludes_who_forges_that_much(name: str) -> None:
    ends = {1.0: [], 0.1: []}  # type: dict[float, list[tuple[SequentialResult, int]]]
    honest = []
    for seed in range(100):
        distances = OWN * kernels(200 + seed, JUDGED)
        result, nonces = judged(judge_of(name, Chances(1e-6, 1e-3, share=0.1)), distances)
        assert result is SequentialResult.HONEST
        honest.append(nonces)
        forged = np.random.default_rng(seed).random(JUDGED) < 0.1
        for share, found in ends.items():
            judge = judge_of(name, Chances(1e-6, 1e-3, share=share))
            found.append(judged(judge, np.where(forged, 20 * distances, distances)))
    cleared = {s: sum(r is SequentialResult.HONEST for r, _ in found) for s, found in ends.items()}
    assert cleared[1.0] > 30
    assert cleared[0.1] == 0
    # 1 - 0.1 to the power of n is at most beta.
    assert min(honest) >= 66


@pytest.mark.parametrize(
    ("chances", "field"),
    [((0.0, 0.1, 1.0), "alpha"), ((0.1, 1.0, 1.0), "beta"), ((0.1, 0.1, 0.0), "share")],
)
def test_chances_out_of_range_are_refused(chances: tuple[float, float, float], field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        Chances(*chances)
    assert caught.value.field == field
