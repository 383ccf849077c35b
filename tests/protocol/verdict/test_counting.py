import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.counting import (
    DISTANCE_P_MISMATCH,
    BinomialVerdict,
    binomial_tail,
    convicting_count,
    judge,
    judge_distances,
    power,
    rate_interval,
    sample_size,
)


def assert_like_scipy(k: int, n: int, p: float) -> None:
    expected = float(binom.sf(k - 1, n, p))
    # Down there scipy itself loses digits: half of them at 1e-292, all of them at 1e-296.
    assert binomial_tail(k, n, p) == pytest.approx(expected, rel=1e-9, abs=1e-250)


@given(st.data(), st.integers(0, 3000), st.floats(1e-6, 1 - 1e-6))
def test_the_tail_is_scipys(data: st.DataObject, n: int, p: float) -> None:
    assert_like_scipy(data.draw(st.integers(0, n)), n, p)


def to_sixty_digits(k: int, n: int, p: float) -> float:
    with localcontext() as context:
        context.prec = 60
        chance = Decimal(p)
        term = math.comb(n, k) * chance**k * (1 - chance) ** (n - k)
        total = term
        for i in range(k, n):
            term *= (n - i) * chance / ((i + 1) * (1 - chance))
            total += term
        return float(total)


def test_a_tail_near_underflow_is_that_of_sixty_digits() -> None:
    assert binomial_tail(305, 319, 0.09375) == pytest.approx(6.94635891486315e-291, rel=1e-9)


@given(st.data(), st.integers(0, 3000), st.floats(1e-6, 1 - 1e-6))
def test_the_tail_is_that_of_sixty_digits(data: st.DataObject, n: int, p: float) -> None:
    k = data.draw(st.integers(0, n))
    assert binomial_tail(k, n, p) == pytest.approx(to_sixty_digits(k, n, p), rel=1e-9, abs=1e-300)


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
    assert judge(0, 0, 0.001, 0.01) == BinomialVerdict(1.0, False)
    assert judge_distances(0, 0, 0.01) == BinomialVerdict(-1.0, False)


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


@given(st.data(), st.integers(1, 2000), st.sampled_from([0.9, 0.95, 0.999]))
def test_the_interval_of_a_rate_is_scipys(data: st.DataObject, n: int, confidence: float) -> None:
    k = data.draw(st.integers(0, n))
    expected = binomtest(k, n).proportion_ci(confidence, method="exact")
    assert rate_interval(k, n, confidence) == pytest.approx((expected.low, expected.high), abs=1e-9)


@given(st.integers(0, 400), st.floats(1e-4, 0.5), st.floats(1e-9, 0.5))
def test_the_convicting_count_is_where_the_verdict_turns(n: int, p: float, alpha: float) -> None:
    needed = convicting_count(n, p, alpha)
    verdicts = [judge(k, n, p, alpha).fraud_detected for k in range(n + 1)]
    assert verdicts.index(True) == needed if needed is not None else not any(verdicts)


def test_power_is_how_often_it_convicts() -> None:
    generator = np.random.default_rng(7)
    counts = generator.binomial(200, 0.02, size=20_000)
    convicted = np.mean([judge(int(k), 200, 0.001, 1e-3).fraud_detected for k in counts])
    # Four standard errors of the simulation.
    assert power(200, 0.001, 1e-3, 0.02) == pytest.approx(float(convicted), abs=0.014)


@pytest.mark.parametrize(("rate", "wanted"), [(1.0, 0.999), (0.3, 0.999), (0.05, 0.9)])
def test_a_sample_is_no_larger_than_it_has_to_be(rate: float, wanted: float) -> None:
    size = sample_size(0.001, 1e-6, rate, wanted, 1000)
    assert size is not None
    assert power(size, 0.001, 1e-6, rate) >= wanted
    assert all(power(n, 0.001, 1e-6, rate) < wanted for n in range(size))


def test_a_rate_below_the_honest_one_needs_more_than_there_is() -> None:
    assert sample_size(0.001, 1e-6, 0.0005, 0.999, 200) is None


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("k", lambda: rate_interval(3, 2)),
        ("n", lambda: rate_interval(0, 0)),
        ("confidence", lambda: rate_interval(1, 2, 1.0)),
        ("n", lambda: convicting_count(-1, 0.1, 0.1)),
        ("p", lambda: convicting_count(3, 1.5, 0.1)),
        ("fraud_threshold", lambda: convicting_count(3, 0.5, 2.0)),
        ("rate", lambda: power(3, 0.5, 0.1, -0.1)),
        ("wanted", lambda: sample_size(0.5, 0.1, 0.9, 1.1, 10)),
    ],
)
def test_a_question_out_of_range_is_named(field: str, call: Callable[[], object]) -> None:
    with pytest.raises(ProtocolError) as caught:
        call()
    assert caught.value.field == field
