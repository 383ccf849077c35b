"""A fixed window never grants more than its limit, and loses nothing that was given back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proofserve.web import FixedWindow


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_last_unit_fits_and_one_more_does_not() -> None:
    window = FixedWindow(10)
    assert window.take(7)
    assert not window.take(4)
    assert window.take(3)
    assert not window.take(1)


def test_a_window_begins_with_its_first_use_and_lasts_a_minute() -> None:
    window = FixedWindow(10, clock := Clock())
    clock.now += 45
    assert window.take(10)
    assert window.seconds_left == 60
    clock.now += 59.9
    assert not window.take(1)
    assert window.seconds_left == pytest.approx(0.1)
    clock.now += 0.1
    assert window.take(10)
    assert window.seconds_left == 60


def test_a_window_may_last_an_hour_and_says_what_is_left() -> None:
    window = FixedWindow(10, clock := Clock(), seconds=3600)
    assert window.left == 10
    assert window.take(4)
    clock.now += 3599
    assert (window.left, window.seconds_left) == (6, 1)
    clock.now += 1
    assert window.left == 10


def test_before_the_first_use_no_window_is_open() -> None:
    assert FixedWindow(10).seconds_left == 0


def test_what_is_given_back_can_be_taken_again() -> None:
    window = FixedWindow(100)
    assert window.take(100)
    window.give_back(60, window.end)
    assert not window.take(61)
    assert window.take(60)
    assert not window.take(1)


def test_what_is_given_back_after_its_window_does_not_count() -> None:
    window = FixedWindow(100, clock := Clock())
    assert window.take(100)
    old = window.end
    clock.now += 60
    window.give_back(100, old)
    assert window.take(100)
    window.give_back(100, old)
    assert not window.take(1)


def test_the_rest_of_a_window_is_not_saved_for_the_next() -> None:
    window = FixedWindow(1000, clock := Clock())
    assert window.take(1)
    clock.now += 60
    assert window.take(1000)
    assert not window.take(1)


def test_a_charge_counts_even_beyond_the_limit() -> None:
    window = FixedWindow(100)
    assert window.take(90)
    window.charge(50)
    assert not window.take(1)


def test_a_charge_leaves_the_rest_of_the_window() -> None:
    window = FixedWindow(1000)
    assert window.take(1)
    window.charge(990)
    assert window.take(9)
    assert not window.take(1)


def test_a_charge_opens_a_window() -> None:
    window = FixedWindow(100, clock := Clock())
    assert window.take(100)
    clock.now += 61
    window.charge(200)
    assert not window.take(1)
    assert window.seconds_left == 60


def test_what_is_given_back_pays_for_a_charge_first() -> None:
    window = FixedWindow(100)
    assert window.take(90)
    window.charge(50)
    window.give_back(90, window.end)
    assert not window.take(51)
    assert window.take(50)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 40)),
        st.tuples(st.just("back"), st.integers(0, 40)),
        st.tuples(st.just("charge"), st.integers(1, 40)),
        st.tuples(st.just("wait"), st.integers(1, 40)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(limit=st.sampled_from([1, 30, 60, 250]), steps=STEPS)
def test_a_take_succeeds_exactly_if_the_window_has_that_much_left(
    limit: int, steps: list[tuple[str, int]]
) -> None:
    window = FixedWindow(limit, clock := Clock())
    used, end = 0, 0.0
    taken: list[tuple[int, float]] = []

    def use(amount: int) -> None:
        nonlocal used, end
        if clock.now >= end:
            used, end = 0, clock.now + 60
        used += amount

    for what, amount in steps:
        if clock.now >= end:
            used = 0
        match what:
            case "take":
                fits = used + amount <= limit
                assert window.take(amount) is fits
                if fits:
                    use(amount)
                    taken.append((amount, window.end))
                    assert window.end == end
            case "back" if taken:
                whole, its_end = taken.pop()
                window.give_back(min(amount, whole), its_end)
                used -= min(amount, whole) if its_end == end and clock.now < end else 0
            case "charge":
                window.charge(amount)
                use(amount)
            case "wait":
                clock.now += amount
