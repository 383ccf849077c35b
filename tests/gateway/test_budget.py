"""So much per minute: never more, and what was not used is not lost."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits.storage import memory
from limits.strategies import FixedWindowRateLimiter

from gateway.kit import Clock
from proofserve.gateway.limits import budget as module
from proofserve.gateway.limits.budget import PURSE, Budget, Meter


@contextmanager
def at_our_time() -> Iterator[Clock]:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", clock)
        patch.setattr(memory, "time", clock)
        yield clock


@pytest.fixture
def clock() -> Iterator[Clock]:
    with at_our_time() as clock:
        yield clock


def budget(per_minute: int) -> Budget:
    return Budget(Meter(), "somebody", per_minute)


@pytest.mark.usefixtures("clock")
def test_the_last_one_fits_and_one_more_does_not() -> None:
    some = budget(10)
    assert some.take(7)
    assert not some.take(4)
    assert some.take(3)
    assert not some.take(1)


def test_a_window_begins_with_its_first_use_and_lasts_a_minute(clock: Clock) -> None:
    some = budget(10)
    clock.now += 45
    assert some.take(10)
    assert some.seconds_left() == 60
    clock.now += 59.9
    assert not some.take(1)
    assert some.seconds_left() == pytest.approx(0.1)
    clock.now += 0.1
    assert some.take(10)
    assert some.seconds_left() == 60


def test_before_the_first_use_there_is_nothing_to_wait_for() -> None:
    assert budget(10).seconds_left() == 0


def test_what_is_given_back_may_be_taken_again(clock: Clock) -> None:
    some = budget(100)
    assert some.take(100)
    some.give_back(60, some.window_end)
    assert not some.take(61)
    assert some.take(60)
    assert not some.take(1)


def test_what_comes_back_after_its_window_is_worth_nothing(clock: Clock) -> None:
    some = budget(100)
    assert some.take(100)
    old = some.window_end
    clock.now += 60
    some.give_back(100, old)
    assert some.take(100)
    some.give_back(100, old)
    assert not some.take(1)


def test_what_a_window_left_over_is_not_saved_for_the_next(clock: Clock) -> None:
    some = budget(1000)
    assert some.take(1)
    clock.now += 60
    assert some.take(1000)
    assert not some.take(1)


@pytest.mark.usefixtures("clock")
def test_a_charge_counts_although_the_window_cannot_bear_it() -> None:
    some = budget(100)
    assert some.take(90)
    some.charge(50)
    assert not some.take(1)


@pytest.mark.usefixtures("clock")
def test_a_charge_leaves_only_what_is_really_left() -> None:
    some = budget(1000)
    assert some.take(1)
    some.charge(990)
    assert some.take(9)
    assert not some.take(1)


def test_a_charge_that_opens_a_window_says_how_long_it_lasts(clock: Clock) -> None:
    some = budget(100)
    assert some.take(100)
    clock.now += 61
    some.charge(200)
    assert not some.take(1)
    assert some.seconds_left() == 60


def test_budgets_of_one_meter_are_each_their_own() -> None:
    meter = Meter()
    mine, yours = Budget(meter, "mine", 10), Budget(meter, "yours", 10)
    assert mine.take(10)
    assert yours.take(10)
    assert not mine.take(1)


@pytest.mark.usefixtures("clock")
def test_the_library_counts_and_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    costs: list[int] = []
    hit = FixedWindowRateLimiter.hit

    def counting(self: FixedWindowRateLimiter, *args: object, cost: int = 1) -> bool:
        costs.append(cost)
        return hit(self, *args, cost=cost)  # type: ignore[arg-type]

    monkeypatch.setattr(FixedWindowRateLimiter, "hit", counting)
    some = budget(10_000)
    assert all(some.take(1) for _ in range(10_000))
    assert not some.take(1)
    assert costs == [10_000 // PURSE] * PURSE


@pytest.mark.usefixtures("clock")
def test_a_tight_budget_is_spent_to_the_last_bit_though_the_purse_is_larger() -> None:
    some = budget(250)
    # The purse wants 2 at a time; an odd one remains.
    assert some.take(249)
    assert some.take(1)
    assert not some.take(1)


@pytest.mark.usefixtures("clock")
def test_what_comes_back_pays_for_a_charge_first() -> None:
    some = budget(100)
    assert some.take(90)
    some.charge(50)
    some.give_back(90, some.window_end)
    assert not some.take(51)
    assert some.take(50)


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
@given(per_minute=st.sampled_from([1, 30, 60, 250]), steps=STEPS)
def test_a_take_succeeds_exactly_if_the_window_has_that_much_left(
    per_minute: int, steps: list[tuple[str, int]]
) -> None:
    with at_our_time() as clock:
        some = budget(per_minute)
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
                    fits = used + amount <= per_minute
                    assert some.take(amount) is fits
                    if fits:
                        use(amount)
                        taken.append((amount, some.window_end))
                        assert some.window_end == end
                case "back" if taken:
                    whole, window_end = taken.pop()
                    some.give_back(min(amount, whole), window_end)
                    used -= min(amount, whole) if window_end == end and clock.now < end else 0
                case "charge":
                    some.charge(amount)
                    use(amount)
                case "wait":
                    clock.now += amount
