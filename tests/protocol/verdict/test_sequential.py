import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.counting import SequentialResult, SequentialTest

USUAL = SequentialTest(p_honest=0.001, p_fraud=0.5)


def simulate(
    test: SequentialTest, rate: float, runs: int, most: int
) -> list[tuple[SequentialResult, int]]:
    """Result and nonces of ``runs`` tests of a node that mismatches at ``rate``."""
    generator = np.random.default_rng(11)
    outcomes = []
    for _ in range(runs):
        mismatches = 0
        for n in range(1, most + 1):
            mismatches += int(generator.random() < rate)
            result = test.result(mismatches, n)
            if result is not SequentialResult.UNDECIDED:
                break
        outcomes.append((result, n))
    return outcomes


def test_three_mismatches_convict_and_ten_matches_clear() -> None:
    assert [USUAL.result(n, n) for n in (1, 2, 3)] == ["undecided", "undecided", "fraud"]
    assert USUAL.result(0, 9) is SequentialResult.UNDECIDED
    assert USUAL.result(0, 10) is SequentialResult.HONEST


def test_nothing_seen_tells_nothing() -> None:
    assert USUAL.log_ratio(0, 0) == 0.0
    assert USUAL.result(0, 0) is SequentialResult.UNDECIDED


@given(st.data(), st.integers(0, 300), st.floats(1e-4, 0.4), st.floats(0.41, 0.999))
def test_the_ratio_is_that_of_the_binomial_chances(
    data: st.DataObject, n: int, p_honest: float, p_fraud: float
) -> None:
    k = data.draw(st.integers(0, n))
    expected = binom.logpmf(k, n, p_fraud) - binom.logpmf(k, n, p_honest)
    assert SequentialTest(p_honest, p_fraud).log_ratio(k, n) == pytest.approx(expected, abs=1e-6)


@given(st.integers(1, 200), st.data())
def test_a_mismatch_more_never_speaks_for_honesty(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n - 1))
    assert USUAL.log_ratio(k + 1, n) > USUAL.log_ratio(k, n)


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.35])
def test_the_course_is_what_a_simulation_shows(rate: float) -> None:
    test = SequentialTest(0.05, 0.3, alpha=0.01, beta=0.02)
    course = test.course(rate, 60)
    outcomes = simulate(test, rate, 4000, 60)
    results = [result for result, _ in outcomes]
    # Four standard errors of a chance and of a mean over 4,000 runs.
    assert course.convicted == pytest.approx(
        results.count(SequentialResult.FRAUD) / 4000, abs=0.032
    )
    assert course.cleared == pytest.approx(results.count(SequentialResult.HONEST) / 4000, abs=0.032)
    assert course.undecided == pytest.approx(
        results.count(SequentialResult.UNDECIDED) / 4000, abs=0.032
    )
    nonces = [n for _, n in outcomes]
    error = 4 * float(np.std(nonces)) / math.sqrt(4000)
    assert course.expected_nonces == pytest.approx(float(np.mean(nonces)), abs=error)


@given(st.floats(1e-4, 0.2), st.floats(0.21, 0.99), st.floats(1e-6, 0.2), st.floats(1e-4, 0.2))
def test_both_errors_keep_to_their_bounds(
    p_honest: float, p_fraud: float, alpha: float, beta: float
) -> None:
    test = SequentialTest(p_honest, p_fraud, alpha, beta)
    assert test.course(p_honest, 120).convicted <= alpha * (1 + 1e-6)
    assert test.course(p_fraud, 120).cleared <= beta * (1 + 1e-6)


def test_what_a_thousand_runs_show_keeps_to_the_bounds() -> None:
    honest = [finding for finding, _ in simulate(USUAL, 0.001, 1000, 200)]
    fraud = [finding for finding, _ in simulate(USUAL, 0.5, 1000, 200)]
    assert SequentialResult.FRAUD not in honest
    # One in a thousand is the bound; five would be a chance of 0.004.
    assert fraud.count(SequentialResult.HONEST) < 5


def test_how_many_nonces_convict() -> None:
    assert USUAL.course(1.0, 10).nonces_to_convict(0.999) == 3
    assert USUAL.course(1.0, 2).nonces_to_convict(0.999) is None
    tuned = SequentialTest(0.001, 0.1)
    needed = tuned.course(0.1, 1000).nonces_to_convict(0.99)
    assert needed is not None
    assert tuned.course(0.1, needed).convicted >= 0.99
    assert tuned.course(0.1, needed - 1).convicted < 0.99


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("p_honest", {"p_honest": 0.0}),
        ("p_fraud", {"p_fraud": 1.0}),
        ("p_fraud", {"p_fraud": 0.001}),
        ("alpha", {"alpha": 0.0}),
        ("beta", {"beta": math.nan}),
    ],
)
def test_a_test_that_cannot_be_is_refused(field: str, change: dict[str, float]) -> None:
    with pytest.raises(ProtocolError) as caught:
        SequentialTest(**{"p_honest": 0.001, "p_fraud": 0.5, **change})
    assert caught.value.field == field


def test_a_question_out_of_range_is_named() -> None:
    with pytest.raises(ProtocolError, match="n_mismatch"):
        USUAL.result(3, 2)
    with pytest.raises(ProtocolError, match="rate"):
        USUAL.course(1.5, 10)
    with pytest.raises(ProtocolError, match="most"):
        USUAL.course(0.5, 0)
    with pytest.raises(ProtocolError, match="power"):
        USUAL.course(0.5, 10).nonces_to_convict(1.0)
