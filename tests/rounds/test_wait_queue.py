from proofserve.rounds.wait_queue import WaitQueue


def test_places_are_called_in_the_order_of_joining() -> None:
    line = WaitQueue()
    first, second, third = line.join(), line.join(), line.join()
    assert [first.is_set(), second.is_set(), third.is_set()] == [True, False, False]
    line.leave(first)
    assert second.is_set()
    assert not third.is_set()


def test_leaving_from_the_middle_calls_nobody() -> None:
    line = WaitQueue()
    first, second, third = line.join(), line.join(), line.join()
    line.leave(second)
    line.leave(second)
    assert not third.is_set()
    line.leave(first)
    assert third.is_set()
