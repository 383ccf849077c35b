"""Which engine core takes which batch of a lane, without engines."""

import random

import pytest

from proofserve.rounds.generation import SharedLane


def lane(most_ahead: int = 4, cores: int = 2, start: int = 0) -> SharedLane[str]:
    return SharedLane(start, 10, most_ahead, set(range(cores)))


def test_cores_take_one_batch_after_the_other() -> None:
    shared = lane(start=30)
    assert [shared.take(core) for core in (0, 1, 1, 0)] == [30, 40, 50, 60]


def test_results_leave_in_lane_order() -> None:
    shared = lane()
    assert [shared.take(0), shared.take(1)] == [0, 10]
    shared.finish(10, "second")
    assert shared.pop() is None
    shared.finish(0, "first")
    assert [shared.pop(), shared.pop(), shared.pop()] == ["first", "second", None]


def test_no_core_runs_too_far_ahead_of_the_oldest_batch() -> None:
    shared = lane(most_ahead=2)
    assert [shared.take(0), shared.take(1), shared.take(1)] == [0, 10, None]
    shared.finish(10, "second")
    assert shared.take(1) is None
    shared.finish(0, "first")
    assert shared.pop() == "first"
    assert shared.take(1) == 20


def test_another_core_takes_the_oldest_returned_batch_first() -> None:
    shared = lane()
    assert [shared.take(0), shared.take(0), shared.take(1)] == [0, 10, 20]
    shared.give_back(10, 0)
    shared.give_back(0, 0)
    assert [shared.take(1), shared.take(1), shared.take(1)] == [0, 10, 30]


def test_a_core_leaves_its_own_batch_to_the_others() -> None:
    shared = lane(most_ahead=2)
    assert shared.take(0) == 0
    shared.give_back(0, 0)
    assert [shared.take(0), shared.take(0)] == [10, None]
    assert shared.take(1) == 0


def test_the_last_core_goes_on_with_its_own_batch_at_once() -> None:
    shared = lane()
    assert [shared.take(0), shared.take(1)] == [0, 10]
    shared.leave(1)
    shared.give_back(10, 1)
    shared.give_back(0, 0)
    assert [shared.take(0), shared.take(0), shared.take(0)] == [0, 10, 20]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_cores_do_every_batch_leaves_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    shared = lane(most_ahead=chance.randint(1, 6), cores=3)
    held: list[tuple[int, int]] = []
    left: list[str] = []
    while len(left) < 100:
        core = chance.randrange(3)
        if core in shared.cores and len(held) < 6 and (batch := shared.take(core)) is not None:
            held.append((batch, core))
        if held:
            batch, core = held.pop(chance.randrange(len(held)))
            if chance.random() < 0.3:
                shared.give_back(batch, core)
            else:
                shared.finish(batch, str(batch))
        if chance.random() < 0.01 and len(shared.cores) > 1:
            shared.leave(max(shared.cores))
        while (result := shared.pop()) is not None:
            left.append(result)
    assert left == [str(10 * number) for number in range(len(left))]
