"""Permits: never more than the limit, none lost, granted in the order of arrival."""

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proofserve.gateway.gateway import Entry, PermitQueue


class Waiting:
    """Records that it got a permit, and then calls the test's function."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.permits = 0
        self._then = then

    def permit_granted(self) -> None:
        self.permits += 1
        self._then()


def full(limit: int, queue_limit: int) -> PermitQueue:
    admission = PermitQueue(limit, queue_limit)
    for _ in range(limit):
        assert admission.enter(Waiting()) is Entry.GRANTED
    return admission


def test_the_oldest_waiter_gets_the_next_permit() -> None:
    admission = full(1, 10)
    first, second = Waiting(), Waiting()
    assert admission.enter(first) is admission.enter(second) is Entry.QUEUED
    admission.leave(0.0)
    assert (first.permits, second.permits) == (1, 0)
    admission.leave(0.0)
    assert (first.permits, second.permits) == (1, 1)


def test_a_request_that_gets_a_free_permit_has_no_callback() -> None:
    waiter = Waiting()
    assert PermitQueue(1, 0).enter(waiter) is Entry.GRANTED
    assert waiter.permits == 0


def test_a_full_queue_refuses() -> None:
    admission = full(1, 2)
    assert admission.enter(Waiting()) is admission.enter(Waiting()) is Entry.QUEUED
    assert admission.enter(Waiting()) is Entry.REFUSED
    assert admission.queued == 2


def test_without_a_queue_no_request_waits() -> None:
    admission = full(2, 0)
    assert admission.enter(Waiting()) is Entry.REFUSED
    admission.leave(0.0)
    assert admission.enter(Waiting()) is Entry.GRANTED


def test_a_waiter_that_leaves_the_queue_frees_its_place_and_gets_no_permit() -> None:
    admission = full(1, 2)
    gone, stays = Waiting(), Waiting()
    admission.enter(gone)
    admission.enter(stays)
    admission.abandon(gone)
    assert admission.enter(Waiting()) is Entry.QUEUED
    admission.leave(0.0)
    assert (gone.permits, stays.permits) == (0, 1)


def test_a_waiter_that_leaves_twice_counts_once() -> None:
    admission = full(1, 2)
    waiter = Waiting()
    admission.enter(waiter)
    admission.abandon(waiter)
    with pytest.raises(KeyError):
        admission.abandon(waiter)


def test_thousands_of_waiters_that_fail_at_once_do_not_recurse() -> None:
    admission = full(1, 5_000)
    waiters = [Waiting(lambda: admission.leave(0.0)) for _ in range(5_000)]
    for waiter in waiters:
        assert admission.enter(waiter) is Entry.QUEUED
    admission.leave(0.0)
    assert {waiter.permits for waiter in waiters} == {1}
    assert (admission.in_use, admission.queued) == (0, 0)


def test_a_request_that_comes_while_permits_are_granted_waits_in_order() -> None:
    admission = full(1, 10)
    newcomer = Waiting()
    second = Waiting()

    def fail() -> None:
        admission.leave(0.0)
        assert admission.enter(newcomer) is Entry.QUEUED

    admission.enter(Waiting(fail))
    admission.enter(second)
    admission.leave(0.0)
    assert (second.permits, newcomer.permits) == (1, 0)


def test_a_waiter_that_raises_does_not_stop_the_others() -> None:
    admission = full(2, 10)

    def burst() -> None:
        raise RuntimeError("its own fault")

    admission.enter(Waiting(burst))
    after = Waiting()
    admission.enter(after)
    with pytest.raises(RuntimeError, match="its own fault"):
        admission.leave(0.0)
    admission.leave(0.0)
    assert after.permits == 1


class RandomWaiters(RuleBasedStateMachine):
    """Waiters come, leave and give up at random; some fail when they get a permit."""

    @initialize(limit=st.integers(1, 4), queue_limit=st.integers(0, 6))
    def opened(self, limit: int, queue_limit: int) -> None:
        self.admission = PermitQueue(limit, queue_limit)
        self.inside: list[Waiting] = []
        self.queue: deque[Waiting] = deque()

    def _waiter(self, fails: bool) -> Waiting:
        def granted() -> None:
            # Only the waiter at the head of the queue may be called.
            assert self.queue.popleft() is waiter
            if fails:
                self.admission.leave(0.0)
            else:
                self.inside.append(waiter)

        waiter = Waiting(granted)
        return waiter

    @rule(fails=st.booleans())
    def enter(self, fails: bool) -> None:
        free = len(self.inside) < self.admission.limit
        room = len(self.queue) < self.admission.queue_limit
        waiter = self._waiter(fails)
        entry = self.admission.enter(waiter)
        if free:
            assert entry is Entry.GRANTED
            self.inside.append(waiter)
        elif room:
            assert entry is Entry.QUEUED
            self.queue.append(waiter)
        else:
            assert entry is Entry.REFUSED

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
        self.admission.leave(0.0)

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        waiter = self.queue[data.draw(st.integers(0, len(self.queue) - 1))]
        self.queue.remove(waiter)
        self.admission.abandon(waiter)

    @invariant()
    def permits_are_never_too_many_and_never_lost(self) -> None:
        assert self.admission.in_use == len(self.inside) <= self.admission.limit
        assert self.admission.queued == len(self.queue) <= self.admission.queue_limit
        assert not self.queue or self.admission.in_use == self.admission.limit


TestComings = RandomWaiters.TestCase


def test_the_expected_wait_follows_from_recent_permit_times() -> None:
    admission = PermitQueue(2, 10)
    assert admission.expected_wait == 0.0
    for _ in range(100):
        admission.enter(Waiting())
        admission.leave(4.0)
    # Two permits, each held for four seconds: one is freed every two seconds.
    assert admission.expected_wait == pytest.approx(2.0, rel=0.01)
    for _ in range(5):
        admission.enter(Waiting())
    assert admission.queued == 3
    assert admission.expected_wait == pytest.approx(8.0, rel=0.01)
