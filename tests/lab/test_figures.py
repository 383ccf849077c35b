import pytest

from proofserve.reports import Figure, Limit, Report
from proofserve_lab.bench.generation import ratios_to_neighbours
from proofserve_lab.bench.statistics import median, quantile


@pytest.mark.parametrize(
    ("limit", "value", "holds"),
    [
        (Limit(0.95), 0.95, True),
        (Limit(0.95), 0.9499, False),
        (Limit(10, at_most=True), 10, True),
        (Limit(10, at_most=True), 10.01, False),
        (Limit(1), float("nan"), False),
        (Limit(1, at_most=True), float("nan"), False),
    ],
)
def test_a_limit_includes_its_bound_and_nan_keeps_none(
    limit: Limit, value: float, holds: bool
) -> None:
    assert limit.holds(value) is holds


def test_a_limit_reads_as_it_is_meant() -> None:
    assert str(Limit(0.95)) == ">= 0.95"
    assert str(Limit(0, at_most=True)) == "<= 0"


def test_what_was_not_measured_has_not_passed() -> None:
    assert Figure("x", None, "", Limit(1)).passed is False
    assert Figure("x", None, "").passed is None


def test_figures_without_a_limit_break_none() -> None:
    assert Report("", (Figure("x", 0, ""), Figure("y", 2, "", Limit(1))), {}, {}, {}).passed
    assert not Report("", (Figure("x", 0, ""), Figure("y", 0, "", Limit(1))), {}, {}, {}).passed


def test_median_of_nothing_is_nothing() -> None:
    assert median([]) is None
    assert median([3, 1, 2]) == 2


@pytest.mark.parametrize(("share", "value"), [(0.5, 5), (0.95, 10), (0.05, 1), (1.0, 10)])
def test_a_quantile_is_a_value_that_was_seen(share: float, value: int) -> None:
    assert quantile(list(range(10, 0, -1)), share) == value


def test_a_quantile_of_nothing_is_nothing() -> None:
    assert quantile([], 0.5) is None


def test_an_even_drift_of_the_machine_cancels() -> None:
    # The machine loses a tenth of its speed at every window; the round keeps nine tenths.
    speeds = [100.0, 90.0, 80.0, 70.0, 60.0]
    reference = speeds[::2]
    values = [0.9 * speed for speed in speeds[1::2]]
    assert ratios_to_neighbours(values, reference) == pytest.approx([0.9] * len(values))


def test_a_single_bad_window_does_not_decide() -> None:
    ratios = ratios_to_neighbours([99, 10, 99], [100, 100, 100, 100])
    assert median(ratios) == pytest.approx(0.99)


def test_a_missing_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratios_to_neighbours([1.0, 1.0], [1.0, 1.0])
