"""Several backends: the gateway hides a fault from the client if another backend can answer."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.scripted import (
    END,
    JSON_BODY,
    SSE_HEAD,
    Backend,
    Call,
    Script,
    answer,
    answers,
    backends,
    event,
    silent,
)
from gateway.serving import (
    KINDS_OF_LOOP,
    Server,
    never_tried_again,
    once,
    order,
    plan_for,
    post,
    serving,
)
from gateway.test_faults import BROKEN, nothing_is_held
from proofserve.gateway.failures import BACKEND_BROKE
from proofserve.gateway.records import Timeouts
from support.pace import until

pytestmark = pytest.mark.anyio

LOOPS = pytest.mark.parametrize("loop", KINDS_OF_LOOP)
FAULTS: dict[str, Script] = {
    **{name: script for name, (script, _) in BROKEN.items()},
    "500": answer("500 Internal Server Error"),
    "503": answer("503 Service Unavailable"),
    "a large 500": answer("500 Internal Server Error", b"x" * 3_000_000),
    "silent": silent,
}


@pytest.fixture(scope="module")
async def running() -> AsyncIterator[tuple[list[Backend], Server]]:
    async with (
        backends(answers, answers, answers) as three,
        serving(plan_for(*three, timeouts=Timeouts(first_byte=3.0))) as server,
    ):
        yield three, server


@pytest.mark.parametrize("script", FAULTS.values(), ids=list(FAULTS))
async def test_after_two_faults_the_third_backend_answers(
    running: tuple[list[Backend], Server], script: Script
) -> None:
    (one, two, good), server = running
    for backend, known in zip((one, two, good), server.gateway.pool.backends, strict=True):
        backend.calls.clear()
        # Each test starts with no recorded faults.
        known.worked()
    one.script = two.script = script
    got = await asyncio.gather(*(once(server.port) for _ in range(9)))
    assert [each.raw for each in got] == [JSON_BODY] * 9
    assert one.calls
    assert two.calls
    assert len(good.calls) == 9
    await nothing_is_held(server, one, two, good)


@LOOPS
async def test_the_gateway_skips_a_backend_that_refuses_connections(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_tried_again(monkeypatch)
    async with (
        backends(answers, answers) as (gone, good),
        serving(plan_for(gone, good), loop) as server,
    ):
        await gone.die()
        got = [await once(server.port) for _ in range(12)]
        assert [each.raw for each in got] == [JSON_BODY] * 12
        # After a few faults the gateway sends it no more requests.
        assert server.gateway.pool.backends[0].resting
        assert server.gateway.totals.retries["backend_unreachable"] == 3


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "429 Too Many Requests"])
async def test_a_4xx_is_an_answer_and_is_not_retried(status: str) -> None:
    script = answer(status, b"theirs")
    async with backends(script, script) as both, serving(plan_for(*both)) as server:
        got = [await once(server.port) for _ in range(8)]
        assert [each.raw for each in got] == [b"theirs"] * 8
        assert [len(each.calls) for each in both] == [4, 4]
        assert not any(each.resting for each in server.gateway.pool.backends)
        assert sum(server.gateway.totals.retries.values()) == 0


async def test_the_client_gets_the_last_backends_error_if_all_fail() -> None:
    scripts = [answer(f"500 {name}", name.encode()) for name in ("a", "b", "c", "d")]
    async with backends(*scripts) as four, serving(plan_for(*four)) as server:
        got = await once(server.port)
        # Three attempts, and not one for each of twenty backends.
        assert sum(len(each.calls) for each in four) == 3
        (unasked,) = [each for each in four if not each.calls]
        assert got.status == 500
        assert got.raw in {b"a", b"b", b"c", b"d"} - {b"abcd"[four.index(unasked) :][:1]}


async def test_after_the_first_byte_the_gateway_does_not_retry() -> None:
    async def breaks(call: Call) -> None:
        await call.send(SSE_HEAD, event("one"))
        await call.close()

    async with backends(breaks, breaks) as both, serving(plan_for(*both)) as server:
        got = await once(server.port, post(order(stream=True)))
        assert got.last_code == "backend_broke"
        assert sum(len(each.calls) for each in both) == 1


async def test_the_next_backend_gets_the_same_body_as_the_first() -> None:
    async def reads_and_resets(call: Call) -> None:
        await call.reset()

    large = order(user="y" * 2_000_000)
    async with (
        backends(reads_and_resets, reads_and_resets, answers) as three,
        serving(plan_for(*three)) as server,
    ):
        assert (await once(server.port, post(large))).status == 200
        calls = [call for each in three for call in each.calls]
        assert [call.body for call in calls] == [large] * len(calls)
        assert len({call.header("x-request-id")[0] for call in calls}) == 1


# -- a death under load --------------------------------------------------------------------------


class Load:
    """Sends requests from several workers; every third request is a stream."""

    def __init__(self, server: Server, total: int, at_a_time: int) -> None:
        self._server = server
        self._room = asyncio.Semaphore(at_a_time)
        self._total = total
        self.done = 0
        self.broken: list[str | None] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._one(number) for number in range(self._total)))

    async def _one(self, number: int) -> None:
        stream = number % 3 == 0
        async with self._room:
            got = await once(self._server.port, post(order(stream=stream, user=str(number))))
        self.done += 1
        assert got.status == 200
        if not stream:
            assert got.raw == JSON_BODY
        elif got.raw != event("one") + event("two") + END:
            # Only a stream that had begun may break, if only with its head, and it ends with an
            # error event.
            rest = got.raw.removeprefix(event("one")).removeprefix(event("two"))
            assert rest == BACKEND_BROKE.last_chunks()
            self.broken.append(got.last_code)


@LOOPS
async def test_a_death_under_load_breaks_only_what_had_begun(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_tried_again(monkeypatch)
    begun: list[Call] = []

    async def works(call: Call) -> None:
        if b'"stream": true' in call.body:
            begun.append(call)
            await call.send(SSE_HEAD, event("one"))
            await asyncio.sleep(0.03)
            await call.send(event("two"), END)
            begun.remove(call)
        else:
            await asyncio.sleep(0.02)
            await answers(call)

    async def dies(victim: Backend, load: Load) -> int:
        await until(lambda: load.done >= 100 and victim.now >= 3)
        open_streams = sum(call in victim.calls for call in begun)
        await victim.die()
        return open_streams

    async with backends(works, works, works) as three, serving(plan_for(*three), loop) as server:
        load = Load(server, 300, 30)
        _, open_streams = await asyncio.gather(load.run(), dies(three[0], load))
        assert load.done == 300
        assert load.broken == ["backend_broke"] * len(load.broken)
        assert len(load.broken) <= open_streams
        assert server.gateway.pool.backends[0].resting
        await nothing_is_held(server, *three)


async def test_a_backend_that_comes_back_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proofserve.gateway.backends.REST_S", 0.2)
    async with backends(answers, answers) as (one, two), serving(plan_for(one, two)) as server:
        await one.die()
        for _ in range(8):
            assert (await once(server.port)).status == 200
        before = len(one.calls)
        await one.start()

        async def asked_again() -> None:
            while len(one.calls) == before:
                assert (await once(server.port)).status == 200

        await asyncio.wait_for(asked_again(), 10.0)
