"""Gateways that count the limits of keys together, through a real Redis."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
from prometheus_client import generate_latest

from gateway.scripted import PATIENCE_S, answers, backends
from gateway.serving import Server, once, order, plan_for, post, serving
from proofserve.gateway import gateway as relay_gateway
from proofserve.gateway import limits
from proofserve.gateway.limits import SharedBudgets, SharedWindow, redis_client
from proofserve.gateway.records import ClientSpec
from support.pace import until
from support.redis_server import RedisServer, running_redis

pytestmark = pytest.mark.anyio

KEY = "Authorization: Bearer secret"
LIMIT = 20
NAME = "one:requests"


class Clock:
    """Seconds since the epoch, in the middle of a minute until a test moves it."""

    def __init__(self) -> None:
        self.now = 1_800_000_030.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an answer of Redis may be late, and what is sent again counts twice."""
    monkeypatch.setattr(limits, "ANSWER_S", 60.0)


@pytest.fixture(scope="module")
def programs() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def redis(programs: RedisServer) -> RedisServer:
    """An empty server."""
    programs.stop()
    programs.start()
    return programs


@asynccontextmanager
async def sharing(redis: RedisServer, clock: Clock) -> AsyncIterator[SharedBudgets]:
    budgets = SharedBudgets(redis.url, clock)
    task = asyncio.create_task(budgets.run())
    try:
        yield budgets
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def used(window: SharedWindow) -> int:
    return window._used


# -- windows -------------------------------------------------------------------------------------


async def test_what_one_gateway_spends_is_gone_for_the_other(
    redis: RedisServer, clock: Clock
) -> None:
    async with sharing(redis, clock) as one, sharing(redis, clock) as two:
        first, second = one.window("a", 100), two.window("a", 100)
        other = two.window("b", 100)
        assert first.take(60)
        await until(lambda: used(second) == 60)
        assert not second.take(41)
        assert second.take(40)
        await until(lambda: used(first) == 100)
        assert not first.take(1)
        # What was set aside and not used comes back for both.
        first.give_back(50, first.end)
        await until(lambda: used(second) == 50)
        assert used(other) == 0
        assert second.take(50)
        # More than foreseen counts as well.
        second.charge(7)
        await until(lambda: used(first) == 107)


async def test_the_next_minute_begins_at_nothing_for_all(redis: RedisServer, clock: Clock) -> None:
    async with sharing(redis, clock) as one, sharing(redis, clock) as two:
        first, second = one.window("a", 10), two.window("a", 10)
        assert first.take(10)
        await until(lambda: used(second) == 10)
        assert second.seconds_left == 30.0
        old = second.end
        clock.now += 30.0
        assert second.take(10)
        # Of the old minute nothing comes back.
        second.give_back(10, old)
        await until(lambda: (first.end, used(first)) == (second.end, 10))
        assert not first.take(1)


def test_what_is_used_while_a_message_is_under_way_counts(clock: Clock) -> None:
    changes: list[str] = []
    window = SharedWindow("a", 10, clock, changes.append)
    assert window.take(3)
    assert window.unsent(window.end) == 3
    assert window.take(2)
    window.learn(7, window.end)
    # Three of here and four of elsewhere in the sum, and the two that it does not have yet.
    assert not window.take(2)
    assert window.take(1)
    assert window.unsent(window.end) == 3
    assert changes == ["a"] * 3


async def test_gateways_that_spend_at_once_count_every_unit(
    redis: RedisServer, clock: Clock
) -> None:
    async with sharing(redis, clock) as one, sharing(redis, clock) as two:
        windows = [each.window("a", 10_000) for each in (one, two)]

        async def spend(window: SharedWindow) -> int:
            taken = 0
            for number in range(200):
                taken += 3 if window.take(3) else 0
                await asyncio.sleep(0 if number % 20 else 0.005)
            return taken

        taken = sum(await asyncio.gather(*map(spend, windows)))
        assert taken == 1200
        await until(lambda: [used(each) for each in windows] == [1200, 1200])


# -- gateways ------------------------------------------------------------------------------------


@asynccontextmanager
async def two_gateways(
    redis: RedisServer, clock: Clock, patch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Server, Server, list[object]]]:
    """Two gateways, and the calls that their backend got."""
    patch.setattr(relay_gateway, "SharedBudgets", partial(SharedBudgets, clock=clock))
    clients = (ClientSpec(name="one", key="secret", requests_per_minute=LIMIT),)
    async with backends(answers) as (backend,):
        plan = plan_for(backend, clients=clients, shared_limits=redis.url)
        async with serving(plan) as first, serving(plan) as second:
            yield first, second, backend.calls


def known(server: Server) -> int:
    assert server.gateway.shared is not None
    return used(server.gateway.shared._windows[NAME])


async def chats(server: Server, count: int) -> list[int]:
    return [(await once(server.port, post(order(), KEY))).status for _ in range(count)]


def shows_shared(server: Server) -> bool:
    return b"\ngateway_limits_shared 1.0\n" in generate_latest(server.gateway.metrics)


async def test_two_gateways_spend_one_budget(
    redis: RedisServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_gateways(redis, clock, monkeypatch) as (first, second, calls):
        assert await chats(first, 12) == [200] * 12
        await until(lambda: known(second) == 12)
        assert await chats(second, 9) == [200] * 8 + [429]
        await until(lambda: known(first) == LIMIT)
        refused = await once(first.port, post(order(), KEY))
        assert (refused.status, refused.code) == (429, "request_rate_limit")
        assert refused.header("retry-after") == "30"
        assert len(calls) == LIMIT
        clock.now += 30.0
        assert await chats(first, 1) == [200]


async def test_without_redis_each_gateway_counts_alone_and_says_so(
    redis: RedisServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_gateways(redis, clock, monkeypatch) as (first, second, calls):
        assert await chats(first, 5) == [200] * 5
        await until(lambda: known(second) == 5)
        assert shows_shared(first)
        redis.stop()
        # Each goes on from what it knows.
        assert await chats(first, 16) == [200] * 15 + [429]
        assert await chats(second, 16) == [200] * 15 + [429]
        await until(lambda: not first.gateway.shared.up and not second.gateway.shared.up)  # type: ignore[union-attr]
        assert not shows_shared(first)
        redis.start()
        # What was used meanwhile is told; the five of before went with the server.
        await until(lambda: known(first) == known(second) == 30)
        await until(lambda: shows_shared(first))
        assert len(calls) == 35


async def test_it_ends_though_the_client_of_redis_loses_the_cancellation(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets, asked = SharedBudgets(redis.url), asyncio.Event()

    async def lose(*_: object) -> tuple[dict[str, int], dict[str, int]]:
        if not asked.is_set():
            asked.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(600.0)
        return {}, {}

    monkeypatch.setattr(budgets, "_ask", lose)
    running = asyncio.create_task(budgets.run())
    await asked.wait()
    running.cancel()
    await asyncio.wait([running], timeout=PATIENCE_S)
    assert running.done()


async def test_a_gateway_starts_without_redis(
    redis: RedisServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.stop()
    async with two_gateways(redis, clock, monkeypatch) as (first, _second, _calls):
        assert await chats(first, 2) == [200] * 2


def test_a_url_that_is_none_of_redis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"VLLM_SHARED_LIMITS: .*redis"):
        redis_client("http://redis:6379")
