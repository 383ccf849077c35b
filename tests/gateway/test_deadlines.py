"""One task checks all deadlines."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from proofserve.gateway.gateway import PERIOD_S, Deadlines

pytestmark = pytest.mark.anyio


class Checked:
    """Counts its checks, and then calls the test's function."""

    def __init__(self, then: Callable[[float], None] = lambda _now: None) -> None:
        self.times: list[float] = []
        self.seen = asyncio.Event()
        self._then = then

    def check(self, now: float) -> None:
        self.times.append(now)
        self.seen.set()
        self._then(now)

    def shut_down(self) -> None:
        raise NotImplementedError


@pytest.fixture
async def watch() -> AsyncIterator[Deadlines]:
    watch = Deadlines(asyncio.get_running_loop())
    watch.start()
    yield watch
    watch.stop()


async def once(checked: Checked) -> None:
    """Wait for its next check."""
    checked.seen.clear()
    async with asyncio.timeout(5):
        await checked.seen.wait()


async def test_every_watched_object_is_checked_with_the_loops_time(watch: Deadlines) -> None:
    one, two = Checked(), Checked()
    watch.watched.add(one)
    watch.watched.add(two)
    began = asyncio.get_running_loop().time()
    for _ in range(3):
        await once(one)
    await once(two)
    assert len(two.times) in {3, 4}
    assert one.times[0] == two.times[0]
    assert began <= one.times[0]
    # Of two periods at least: a check that comes late makes the next gap shorter.
    assert one.times[-1] - one.times[0] >= PERIOD_S * 1.5


async def test_an_ended_object_is_not_checked_again(watch: Deadlines) -> None:
    def end(_now: float) -> None:
        watch.watched.discard(ended)

    ended, other = Checked(end), Checked()
    watch.watched.add(ended)
    watch.watched.add(other)
    assert watch.watched == {ended, other}
    await once(other)
    await once(other)
    assert len(ended.times) == 1
    assert list(watch.watched) == [other]
    watch.watched.discard(ended)


async def test_a_check_may_add_another(watch: Deadlines) -> None:
    new = Checked()
    watch.watched.add(Checked(lambda _now: watch.watched.add(new)))
    await once(new)


async def test_the_task_is_idle_while_nothing_is_watched(watch: Deadlines) -> None:
    async with asyncio.timeout(5):
        await watch.idle.wait()
    one = Checked()
    watch.watched.add(one)
    await once(one)
    await once(one)
    assert not watch.idle.is_set()
    watch.watched.discard(one)
    async with asyncio.timeout(5):
        await watch.idle.wait()


async def test_a_check_that_raises_does_not_stop_the_task(watch: Deadlines) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: complaints.append(what))

    def burst(_now: float) -> None:
        watch.watched.discard(bad)
        raise RuntimeError("its own fault")

    bad, good = Checked(burst), Checked()
    watch.watched.add(bad)
    await once(bad)
    watch.watched.add(good)
    await once(good)
    asyncio.get_running_loop().set_exception_handler(None)
    assert [str(each["exception"]) for each in complaints] == ["its own fault"]


async def test_the_task_stops_at_the_shutdown() -> None:
    watch = Deadlines(asyncio.get_running_loop())
    watch.stop()
    one = Checked(lambda _now: watch.stop())
    watch.watched.add(one)
    watch.start()
    await once(one)
    await asyncio.sleep(2 * PERIOD_S)
    assert len(one.times) == 1
