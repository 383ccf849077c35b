"""Bits that agree clear a node; bits that differ say nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proofserve.protocol.verdict.comparison import ClaimError, Mismatch, Reason
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.reports import Progress
from proofserve.verifier.judges import SHARE, Chances
from proofserve.verifier.verification import (
    ExactJudge,
    Verification,
    decide,
    leaves_open,
    nonces_needed,
)

CHANCES = Chances(1e-6, 1e-3)
EQUAL = np.zeros(4, np.float32)
# The least difference of two numbers of float16.
OTHER = np.array([0, 0, 2**-24, 0], np.float32)
OURS = {"engine": "vLLM 0.32.0", "dtype": "bfloat16", "ranks": 1, "processor": None}


def judged(
    errors: list[np.ndarray | None],
    chances: Chances = CHANCES,
    theirs: dict[str, object] | None = None,
) -> Verification:
    claims = [
        ClaimError(nonce, error, None if error is not None else Mismatch(nonce, Reason.MISSING))
        for nonce, error in enumerate(errors)
    ]
    judge = ExactJudge(chances, OURS, theirs)
    return decide(range(len(claims)), lambda ns: [claims[n] for n in ns], 8, [judge], Progress())


def text(found: Verification) -> str:
    return found.opinions[0].text


def test_twenty_equal_vectors_clear_a_node() -> None:
    found = judged([EQUAL] * 64)
    assert (found.verdict, found.nonces_used) == (SequentialResult.HONEST, 20)
    assert text(found) == "equal bits in 20 of 20 nonces"
    assert found.opinions[0].figures["excluded_share"] == 0.3
    assert not leaves_open(found)


def test_too_few_equal_vectors_decide_nothing_and_no_other_test_judges_them() -> None:
    found = judged([EQUAL] * 19)
    assert found.verdict is SequentialResult.UNDECIDED
    assert text(found) == "equal bits in 19 of 19 nonces, 20 are needed"
    assert not leaves_open(found)


@pytest.mark.parametrize("place", [0, 5, 19])
@pytest.mark.parametrize("odd", [OTHER, None])
def test_one_nonce_without_those_bits_leaves_the_node_to_other_tests(
    place: int, odd: np.ndarray | None
) -> None:
    errors = [EQUAL] * 64
    errors[place] = odd
    found = judged(errors)
    assert found.verdict is SequentialResult.UNDECIDED
    assert leaves_open(found)
    assert "excluded_share" not in found.opinions[0].figures


def test_no_error_convicts_or_refutes() -> None:
    judge = ExactJudge(CHANCES, OURS, None)
    far = np.full(4, 2.0, np.float32)
    for nonce in range(1000):
        judge.add(ClaimError(nonce, far))
    assert judge.result() is SequentialResult.UNDECIDED


def test_the_finding_says_in_what_the_engines_differ() -> None:
    errors = [OTHER, EQUAL, None, OTHER]
    assert text(judged(errors)) == (
        "other bits in 2 of 4 nonces: the engines differ, and no vector in 1 of 4 nonces"
    )
    theirs = {**OURS, "dtype": "float32", "ranks": 2, "processor": "a card"}
    assert text(judged([OTHER], theirs=theirs)) == (
        "other bits in 1 of 1 nonces: the engines differ (dtype float32 there, bfloat16 here;"
        " ranks 2 there, 1 here)"
    )
    assert text(judged([OTHER], theirs=OURS)).endswith("differ, and say the same of themselves")
    assert text(judged([None])) == "no vector in 1 of 1 nonces"


@given(st.sampled_from([1.0, 0.5, SHARE, 0.1]), st.floats(1e-9, 0.5))
def test_a_forger_of_the_share_is_cleared_with_beta_at_most(share: float, beta: float) -> None:
    needed = nonces_needed(replace(CHANCES, share=share, beta=beta))
    honest = (needed - 1) * math.log1p(-share) if share < 1 else -math.inf
    assert (1 - share) ** needed <= beta * (1 + 1e-9)
    assert needed == 1 or honest > math.log(beta) - 1e-9


def test_a_node_that_forges_three_tenths_of_its_nonces_is_seldom_cleared() -> None:
    """It has the engine's own bits in the others."""
    drawn = np.random.default_rng(0)
    times = 4000
    cleared = 0
    for forged in drawn.random((times, 20)) < 0.3:
        found = judged([OTHER if each else EQUAL for each in forged])
        cleared += found.verdict is SequentialResult.HONEST
    # 3 of 4000, because 0.7^20 is 8e-4; 16 or more in less than one of 100,000 such tests.
    assert cleared < 16
