import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofserve.protocol.codec import encode
from proofserve.protocol.errors import IncompleteRecomputation, ProtocolError
from proofserve.protocol.verdict.comparison import (
    Claim,
    Comparison,
    Reason,
    compare,
    compare_distances,
)

K = 4
THRESHOLD = 0.1


def vectors(nonces: list[int]) -> dict[int, np.ndarray]:
    return {
        nonce: np.random.default_rng(nonce).normal(size=K).astype(np.float32) for nonce in nonces
    }


def claims_of(computed: dict[int, np.ndarray]) -> list[Claim]:
    return [Claim(nonce, encode(vector[None])[0]) for nonce, vector in computed.items()]


def check(computed: dict[int, np.ndarray], claims: list[Claim]) -> Comparison:
    return compare(list(computed), computed, claims, THRESHOLD, K)


def text_of(*values: float) -> str:
    return encode(np.array([values], dtype=np.float32))[0]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ([], Reason.MISSING),
        ([""], Reason.EMPTY),
        ([text_of(1, 0, 0, 0)] * 2, Reason.DUPLICATE),
        ([text_of(1, 0, 0)], Reason.MALFORMED),
        ([text_of(1, 0, 0, 0, 0)], Reason.MALFORMED),
        ([text_of(1, 0, 0, math.nan)], Reason.MALFORMED),
        ([text_of(1, 0, 0, -math.inf)], Reason.MALFORMED),
        (["!" + text_of(1, 0, 0, 0)], Reason.MALFORMED),
        ([text_of(1, 0.2, 0, 0)], Reason.TOO_FAR),
    ],
)
def test_every_flaw_is_a_mismatch_with_its_reason(texts: list[str], reason: Reason) -> None:
    computed = {7: np.array([1, 0, 0, 0], dtype=np.float32)}
    comparison = check(computed, [Claim(7, text) for text in texts])
    (mismatch,) = comparison.mismatches
    assert comparison.n_total == 1
    assert (mismatch.nonce, mismatch.reason) == (7, reason)
    assert (mismatch.distance is not None) == (reason is Reason.TOO_FAR)
    assert bool(mismatch.detail) == (reason in {Reason.DUPLICATE, Reason.MALFORMED})


def test_honest_claims_agree_in_any_order() -> None:
    computed = vectors([5, 1, 9])
    comparison = check(computed, claims_of(computed)[::-1])
    assert comparison == Comparison(3, ())


def test_mismatches_come_in_the_order_of_the_request() -> None:
    computed = vectors([5, 1, 9])
    assert check(computed, []).mismatch_nonces == (5, 1, 9)


def test_both_sides_are_rounded_to_the_wire() -> None:
    computed = {0: np.full(K, 1.0004, dtype=np.float32)}
    assert compare([0], computed, [Claim(0, text_of(1, 1, 1, 1))], 0.0, K).n_mismatch == 0


def test_the_threshold_is_strict_and_float32() -> None:
    computed = {0: np.zeros(K, dtype=np.float32)}
    claim = [Claim(0, text_of(0.5, 0, 0, 0))]
    assert compare([0], computed, claim, 0.5, K).n_mismatch == 0
    assert compare([0], computed, claim, 0.4999, K).n_mismatch == 1
    # In float32 this threshold is one half, so the distance does not exceed it.
    assert compare([0], computed, claim, math.nextafter(0.5, 0), K).n_mismatch == 0


FLAWS = st.sampled_from(["drop", "empty", "nan", "short", "duplicate", "stray", "far"])


def spoil(claims: list[Claim], index: int, flaw: str) -> list[Claim]:
    """The same claims with one of them dropped, emptied or otherwise made worse."""
    nonce, text = claims[index].nonce, claims[index].vector_b64
    worse = {
        "drop": [],
        "empty": [Claim(nonce, "")],
        "nan": [Claim(nonce, text_of(*[math.nan] * K))],
        "short": [Claim(nonce, text[:-4])],
        "duplicate": [Claim(nonce, text)] * 2,
        "stray": [Claim(nonce, text + "\n")],
        "far": [Claim(nonce, text_of(*[100.0] * K))],
    }[flaw]
    return [*claims[:index], *worse, *claims[index + 1 :]]


@given(
    st.lists(st.integers(0, 2**63 - 1), unique=True, min_size=1, max_size=6),
    st.lists(st.floats(0, 0.2), min_size=6, max_size=6),
    st.dictionaries(st.integers(0, 5), FLAWS),
    st.randoms(use_true_random=False),
)
def test_spoiling_claims_never_improves_the_outcome(
    nonces: list[int], errors: list[float], flaws: dict[int, str], order: random.Random
) -> None:
    computed = vectors(nonces)
    claims = [
        Claim(nonce, encode(vector[None] + np.float32(error))[0])
        for (nonce, vector), error in zip(computed.items(), errors, strict=False)
    ]
    before = set(check(computed, claims).mismatch_nonces)
    # Each claim once: to drop the copy of a duplicate would mend it.
    spoiled = {index: flaw for index, flaw in flaws.items() if index < len(nonces)}
    for index in sorted(spoiled, reverse=True):
        claims = spoil(claims, index, spoiled[index])
    order.shuffle(claims)
    after = check(computed, claims)
    assert after.n_total == len(nonces)
    assert set(after.mismatch_nonces) == before | {nonces[index] for index in spoiled}


@pytest.mark.parametrize(
    "ours",
    [
        {},
        {0: np.zeros(K - 1, dtype=np.float32)},
        {0: np.array([0, 0, 0, np.nan], dtype=np.float32)},
        {0: np.array([0, 0, 0, 1e6], dtype=np.float32)},
    ],
    ids=["missing", "short", "nan", "overflow"],
)
def test_a_gap_on_our_side_is_no_verdict(ours: dict[int, np.ndarray]) -> None:
    with pytest.raises(IncompleteRecomputation, match=r"^computed: ") as caught:
        compare([0], ours, [Claim(0, "")], THRESHOLD, K)
    assert "0" in str(caught.value)


def test_what_cannot_be_compared_is_named() -> None:
    computed = vectors([0])
    with pytest.raises(ProtocolError, match=r"^claims: nonce 3 "):
        check(computed, [Claim(3, "")])
    with pytest.raises(ProtocolError, match=r"^nonces: "):
        compare([0, 0], computed, [], THRESHOLD, K)
    for threshold in (-0.1, math.nan, math.inf):
        with pytest.raises(ProtocolError, match=r"^dist_threshold: "):
            compare([0], computed, [], threshold, K)


@pytest.mark.parametrize(
    ("received", "computed", "reason"),
    [
        (1.3, 1.3, None),
        (1.3, 1.4, None),
        (1.4, 1.3, Reason.TOO_FAR),
        (1.3, 1.41, Reason.TOO_FAR),
        (math.nan, 1.3, Reason.NOT_FINITE),
        (-math.inf, 1.3, Reason.NOT_FINITE),
        (math.inf, 1.3, Reason.NOT_FINITE),
    ],
)
def test_the_rule_of_the_distance_protocol(
    received: float, computed: float, reason: Reason | None
) -> None:
    comparison = compare_distances([4], [computed], [received], r_target=1.4)
    assert [mismatch.reason for mismatch in comparison.mismatches] == ([reason] if reason else [])
    assert comparison.n_total == 1


def test_distances_that_cannot_be_compared_are_named() -> None:
    with pytest.raises(IncompleteRecomputation, match=r"^computed: .*nonce 4"):
        compare_distances([4], [math.nan], [1.3], 1.4)
    with pytest.raises(ProtocolError, match=r"^received: "):
        compare_distances([4], [1.3], [], 1.4)
    with pytest.raises(ProtocolError, match=r"^computed: "):
        compare_distances([4], [], [1.3], 1.4)
    with pytest.raises(ProtocolError, match=r"^nonces: "):
        compare_distances([4, 4], [1.3, 1.3], [1.3, 1.3], 1.4)
    with pytest.raises(ProtocolError, match=r"^r_target: "):
        compare_distances([4], [1.3], [1.3], math.nan)
