"""Idle client connections: the gateway closes them after the keep-alive time."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.scripted import END, SSE_HEAD, Call, Script, answers, backends, event
from gateway.serving import KINDS_OF_LOOP, Wire, order, plan_for, post, serving, wire

pytestmark = pytest.mark.anyio
LOOPS = pytest.mark.parametrize("loop", KINDS_OF_LOOP)
KEEP_S = 0.6
HEALTH = b"GET /v1/health HTTP/1.1\r\nHost: gateway\r\n\r\n"


@asynccontextmanager
async def connected(script: Script, loop: str) -> AsyncIterator[Wire]:
    """A client of a gateway in front of one backend."""
    async with (
        backends(script) as (backend,),
        serving(plan_for(backend), loop, KEEP_S) as server,
        wire(server.port) as client,
    ):
        yield client


async def is_kept_open_by(request: bytes, loop: str) -> None:
    """Send ``request`` for longer than the keep-alive time; the gateway closes only after that."""
    for _ in range(10):
        async with connected(answers, loop) as client:
            began = asked = time.monotonic()
            try:
                while began == asked or time.monotonic() - began < 2.5 * KEEP_S:
                    sent = time.monotonic()
                    assert (await client.ask(request)).status == 200
                    asked = sent
                    await asyncio.sleep(KEEP_S / 6)
            except (ConnectionError, asyncio.IncompleteReadError):
                if time.monotonic() - asked > KEEP_S:
                    # This machine stood still, and the gateway was right to close.
                    continue
                raise
            assert await client.ended()
            assert time.monotonic() - asked > KEEP_S * 0.9
            return
    pytest.fail("this machine stood still in each of ten attempts")


@LOOPS
async def test_the_gateway_closes_an_idle_connection_after_the_keep_alive_time(loop: str) -> None:
    async with connected(answers, loop) as client:
        asked = time.monotonic()
        assert (await client.ask()).status == 200
        assert await client.ended()
        assert time.monotonic() - asked > KEEP_S * 0.9


@LOOPS
async def test_each_answer_restarts_the_keep_alive_time(loop: str) -> None:
    await is_kept_open_by(post(), loop)


@LOOPS
async def test_an_answer_longer_than_the_keep_alive_time_is_complete(loop: str) -> None:
    async def slowly(call: Call) -> None:
        await call.send(SSE_HEAD)
        for number in range(5):
            await asyncio.sleep(KEEP_S / 2)
            await call.send(event(str(number)))
        await call.send(END)

    async with connected(slowly, loop) as client:
        for _ in range(2):
            got = await client.ask(post(order(stream=True)))
            assert got.complete
            assert got.raw.endswith(END)
        assert await client.ended()


@LOOPS
async def test_every_request_of_the_connection_restarts_the_keep_alive_time(loop: str) -> None:
    await is_kept_open_by(HEALTH, loop)
