import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofserve.protocol.codec import decode, encode
from proofserve.protocol.nonces import draw
from proofserve.protocol.verdict.comparison import Claim, Reason
from proofserve.protocol.verdict.counting import SequentialResult, SequentialTest
from proofserve.reports import ReportedError
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import CountJudge, CountRule, Vectors
from proofserve.verifier.verification import Truth, Verification, verify

K = 12
TEST = SequentialTest(p_honest=0.001, p_fraud=0.5)
SEQUENTIAL, FIXED = CountRule(TEST, 0.1), CountRule(TEST, 0.1, sequential=False)
SEVERITY = {SequentialResult.HONEST: 0, SequentialResult.UNDECIDED: 1, SequentialResult.FRAUD: 2}


class Silent:
    """A progress display without output."""

    def step(self, text: str, total: int | None = None) -> None: ...

    def advance(self) -> None: ...

    def seconds(self, elapsed: float) -> None: ...


def vectors(nonces: Sequence[int]) -> Vectors:
    rows = {nonce: np.random.default_rng(nonce).normal(size=K) for nonce in nonces}
    return {n: (row / np.linalg.norm(row)).astype(np.float32) for n, row in rows.items()}


def honest(count: int) -> ClaimedArtifacts:
    texts = encode(np.array(list(vectors(range(count)).values())))
    claims = tuple(Claim(nonce, text) for nonce, text in enumerate(texts))
    return ClaimedArtifacts("block", "key", tuple(range(count)), claims, K, 256)


def judged(claimed: ClaimedArtifacts, rule: CountRule, seed: str = "0") -> Verification:
    sample = draw(claimed.nonces, seed)
    judges = [CountJudge(rule, len(sample))]
    return verify(claimed, sample, Truth(vectors, K, 8), judges, Silent())


def figure(outcome: Verification, name: str) -> float:
    (opinion,) = outcome.opinions
    return float(opinion.figures[name])


def test_an_honest_node_is_cleared_by_ten_nonces() -> None:
    outcome = judged(honest(64), SEQUENTIAL)
    assert (outcome.verdict, outcome.nonces_used) == (SequentialResult.HONEST, 10)
    assert outcome.mismatches(0.1) == ()
    assert figure(outcome, "likelihood_ratio") == pytest.approx((0.5 / 0.999) ** 10)


def test_a_forger_is_convicted_by_three() -> None:
    claimed = honest(64)
    forged = tuple(Claim(c.nonce, claimed.claims[c.nonce - 1].vector_b64) for c in claimed.claims)
    outcome = judged(ClaimedArtifacts("block", "key", claimed.nonces, forged, K, 256), SEQUENTIAL)
    assert (outcome.verdict, outcome.nonces_used) == (SequentialResult.FRAUD, 3)
    assert {mismatch.reason for mismatch in outcome.mismatches(0.1)} == {Reason.TOO_FAR}


def test_nonces_that_run_out_decide_nothing() -> None:
    assert judged(honest(9), SEQUENTIAL).verdict is SequentialResult.UNDECIDED
    assert judged(honest(2), FIXED).verdict is SequentialResult.UNDECIDED


def test_a_fixed_sample_is_recomputed_whole() -> None:
    outcome = judged(honest(64), FIXED)
    assert (outcome.verdict, outcome.nonces_used) == (SequentialResult.HONEST, 64)
    assert figure(outcome, "p_value") == 1.0


def test_empty_vectors_are_no_alibi() -> None:
    claimed = honest(64)
    empty = tuple(Claim(claim.nonce, "") for claim in claimed.claims)
    for rule in (SEQUENTIAL, FIXED):
        outcome = judged(ClaimedArtifacts("block", "key", claimed.nonces, empty, K, 256), rule)
        assert outcome.verdict is SequentialResult.FRAUD


def test_no_artifact_is_no_verdict() -> None:
    with pytest.raises(ReportedError, match="no artifact to verify"):
        judged(honest(0), SEQUENTIAL)


@pytest.mark.parametrize("gap", ["missing", "not finite"])
def test_a_gap_of_our_own_is_no_verdict(gap: str) -> None:
    def recompute(nonces: Sequence[int]) -> Vectors:
        found = dict(vectors(nonces))
        if gap == "missing":
            found.pop(nonces[-1])
        else:
            found[nonces[-1]] = np.full(K, math.nan, dtype=np.float32)
        return found

    claimed = honest(64)
    ours = Truth(recompute, K, 8)
    with pytest.raises(ReportedError, match="no verdict is possible"):
        verify(claimed, claimed.nonces, ours, [CountJudge(SEQUENTIAL, 64)], Silent())


def test_the_seed_decides_the_sample() -> None:
    nonces = range(1000)
    assert draw(nonces, "a", 5) == draw(nonces, "a")[:5]
    assert draw(nonces, "a", 5) != draw(nonces, "b", 5)
    assert sorted(draw(nonces, "a")) == list(nonces)
    # In whatever order they were published.
    assert draw(list(reversed(nonces)), "a", 5) == draw(nonces, "a", 5)


def flipped(text: str, bit: int) -> str:
    """The vector with one bit of its float16 values changed."""
    raw = bytearray(np.asarray(decode(text, K), dtype="<f2").tobytes())
    raw[bit // 8] ^= 1 << bit % 8
    return _base64(bytes(raw))


def _base64(raw: bytes) -> str:
    import base64

    return base64.b64encode(raw).decode()


def spoiled(claims: Sequence[Claim], index: int, flaw: str) -> list[Claim]:
    nonce, text = claims[index].nonce, claims[index].vector_b64
    nan = encode(np.full((1, K), math.nan, dtype=np.float32))[0]
    worse = {
        "dropped": [],
        "empty": [Claim(nonce, "")],
        "truncated": [Claim(nonce, text[:-4])],
        "duplicate": [Claim(nonce, text)] * 2,
        "nan": [Claim(nonce, nan)],
        "sign": [Claim(nonce, flipped(text, 16 * (index % K) + 15))],
        "swapped": [Claim(nonce, claims[index - 1].vector_b64)],
    }[flaw]
    return [*claims[:index], *worse, *claims[index + 1 :]]


FLAWS = st.sampled_from(["dropped", "empty", "truncated", "duplicate", "nan", "sign", "swapped"])


@given(
    st.integers(1, 30),
    st.dictionaries(st.integers(0, 29), FLAWS, max_size=12),
    st.randoms(use_true_random=False),
    st.text(max_size=5),
)
def test_no_forgery_improves_a_verdict(
    count: int, flaws: dict[int, str], order: random.Random, seed: str
) -> None:
    claimed = honest(count)
    claims = list(claimed.claims)
    for index in sorted((i for i in flaws if i < count), reverse=True):
        claims = spoiled(claims, index, flaws[index])
    order.shuffle(claims)
    forged = ClaimedArtifacts("block", "key", claimed.nonces, tuple(claims), K, 256)
    for rule in (SEQUENTIAL, FIXED):
        before, after = judged(claimed, rule, seed), judged(forged, rule, seed)
        assert SEVERITY[after.verdict] >= SEVERITY[before.verdict]
        at_least = {i for i, flaw in flaws.items() if i < count and flaw not in {"sign", "swapped"}}
        used = set(draw(claimed.nonces, seed)[: after.nonces_used])
        assert {mismatch.nonce for mismatch in after.mismatches(0.1)} >= at_least & used


@pytest.mark.parametrize(
    ("rate", "verdict"), [(0.0, SequentialResult.HONEST), (1.0, SequentialResult.FRAUD)]
)
def test_over_a_hundred_seeds_few_nonces_are_enough(rate: float, verdict: SequentialResult) -> None:
    claimed = honest(200)
    if rate:
        claims = tuple(
            Claim(c.nonce, claimed.claims[c.nonce - 1].vector_b64) for c in claimed.claims
        )
        claimed = ClaimedArtifacts("block", "key", claimed.nonces, claims, K, 256)
    outcomes = [judged(claimed, SEQUENTIAL, str(seed)) for seed in range(100)]
    assert {outcome.verdict for outcome in outcomes} == {verdict}
    assert float(np.median([outcome.nonces_used for outcome in outcomes])) <= 10


def test_the_rule_is_told_in_words() -> None:
    assert "further than 0.1 from the recomputed vector" in SEQUENTIAL.description
    assert "one after the other" in SEQUENTIAL.description
    assert "all at once" in FIXED.description
