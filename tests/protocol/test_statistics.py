import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.statistics import (
    DISTANCE_P_MISMATCH,
    Verdict,
    binomial_tail,
    judge,
    judge_distances,
)


def assert_like_scipy(k: int, n: int, p: float) -> None:
    expected = float(binom.sf(k - 1, n, p))
    # Below the normal floats scipy itself has no digits left to compare.
    assert binomial_tail(k, n, p) == pytest.approx(expected, rel=1e-9, abs=1e-300)


@given(st.data(), st.integers(0, 3000), st.floats(1e-6, 1 - 1e-6))
def test_the_tail_is_scipys(data: st.DataObject, n: int, p: float) -> None:
    assert_like_scipy(data.draw(st.integers(0, n)), n, p)


@pytest.mark.parametrize("p", [1e-6, 5e-4, 1e-3, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("deviations", [-6, -1, 0, 1, 6, 30])
def test_the_tail_is_scipys_for_a_million(p: float, deviations: int) -> None:
    n = 10**6
    k = round(n * p + deviations * math.sqrt(n * p * (1 - p)))
    assert_like_scipy(min(max(k, 0), n), n, p)


@given(st.integers(0, 60), st.floats(0, 1))
def test_the_tail_falls_from_one(n: int, p: float) -> None:
    tails = [binomial_tail(k, n, p) for k in range(n + 1)]
    assert tails[0] == 1.0
    assert all(0 <= tail <= 1 + 1e-12 for tail in tails)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(tails))


@pytest.mark.parametrize(("k", "p", "tail"), [(0, 0, 1), (1, 0, 0), (5, 1, 1), (0, 1, 1)])
def test_certainties(k: int, p: float, tail: float) -> None:
    assert binomial_tail(k, 5, p) == tail


def test_an_empty_comparison_proves_nothing() -> None:
    assert judge(0, 0, 0.001, 0.01) == Verdict(1.0, False)
    assert judge_distances(0, 0, 0.01) == Verdict(-1.0, False)


def test_the_threshold_is_strict() -> None:
    p_value = judge(1, 10, 0.001, 0.5).p_value
    assert not judge(1, 10, 0.001, p_value).fraud_detected
    assert judge(1, 10, 0.001, math.nextafter(p_value, 1)).fraud_detected


def test_distances_have_their_own_mismatch_rate() -> None:
    assert judge_distances(1, 20, 0.01) == judge(1, 20, DISTANCE_P_MISMATCH, 0.01)
    assert judge_distances(1, 20, 0.01).fraud_detected


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("n_mismatch", (-1, 10, 0.1, 0.1)),
        ("n_mismatch", (11, 10, 0.1, 0.1)),
        ("n_total", (0, -1, 0.1, 0.1)),
        ("p_mismatch", (0, 10, 1.1, 0.1)),
        ("p_mismatch", (0, 10, math.nan, 0.1)),
        ("fraud_threshold", (0, 10, 0.1, -0.1)),
        ("fraud_threshold", (0, 10, 0.1, math.inf)),
    ],
)
def test_a_number_out_of_range_is_named(
    field: str, arguments: tuple[int, int, float, float]
) -> None:
    with pytest.raises(ProtocolError) as caught:
        judge(*arguments)
    assert caught.value.field == field
