"""Shutdown of the real process: it answers accepted requests and refuses new ones."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from gateway.scripted import (
    END,
    JSON_BODY,
    PATIENCE_S,
    SSE_HEAD,
    Backend,
    Call,
    answer,
    answers,
    backends,
    event,
)
from gateway.serving import Answer, Wire, once, order, post, slow_reader, wire
from proofserve.gateway.app import REPEAT_S
from proofserve.wiring.launch import free_port
from support.pace import until

pytestmark = pytest.mark.anyio

PROOFSERVE = Path(sys.executable).with_name("proofserve")
HEALTH = b"GET /v1/health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
STREAM = event("word") * 10 + END


class Gateway:
    """``proofserve gateway`` as a process, in its own process group."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.port = port
        self._process = process

    def terminate(self, *, group: bool = False) -> None:
        if group:
            os.killpg(self._process.pid, signal.SIGTERM)
        else:
            self._process.terminate()

    async def healthy(self) -> int | None:
        """The HTTP status of /health; None if the connection is refused."""
        try:
            return (await once(self.port, HEALTH)).status
        except (ConnectionError, asyncio.IncompleteReadError):
            return None

    async def becomes(self, status: int | None) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.healthy() != status:
                assert self._process.returncode is None
                await asyncio.sleep(0.02)

    async def exit_code(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self._process.wait()


@asynccontextmanager
async def gateway(backend: Backend, **options: object) -> AsyncIterator[Gateway]:
    port = free_port()
    given = {"backend-url": backend.url, "host": "127.0.0.1", "port": port, **options}
    argv = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    process = await asyncio.create_subprocess_exec(
        PROOFSERVE, "gateway", *argv, start_new_session=True
    )
    try:
        made = Gateway(process, port)
        await made.becomes(200)
        yield made
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def works(call: Call) -> None:
    """Half a second of a stream, or a tenth of a second and JSON."""
    if b'"stream": true' in call.body:
        await call.send(SSE_HEAD)
        for _ in range(10):
            await call.send(event("word"))
            await asyncio.sleep(0.05)
        await call.send(END)
    else:
        await asyncio.sleep(0.1)
        await answers(call)


class Load:
    """Clients that send requests until the port is closed, on one connection or on many."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.served = 0
        self.refused: list[Answer] = []
        self.broken: list[object] = []

    async def client(self, number: int) -> None:
        while True:
            try:
                async with wire(self._port) as client:
                    if not await self._asked(client, number):
                        return
                    while number % 3 == 0:
                        if not await self._asked(client, number):
                            break
            except ConnectionError:
                # Refused, or reset in the backlog: the port is closed.
                return
            await asyncio.sleep(0.01)

    async def _asked(self, client: Wire, number: int) -> bool:
        """Send one more request; return whether the connection is still open."""
        stream = number % 2 == 0
        try:
            got = await client.ask(post(order(stream=stream)))
        except asyncio.IncompleteReadError as error:
            # Closed before the gateway read the request, so it was not accepted.
            self.broken += [error] if error.partial else []
            return False
        except ConnectionError:
            return False
        if got.status == 503:
            self.refused.append(got)
            return True if got.header("connection") is None else number % 3 != 0
        if got.raw == (STREAM if stream else JSON_BODY):
            self.served += 1
        else:
            self.broken.append(got)
        return True


@pytest.mark.parametrize(("workers", "group"), [(1, False), (2, False), (2, True)])
async def test_the_gateway_answers_accepted_requests_and_refuses_the_rest(
    workers: int, group: bool
) -> None:
    async with (
        backends(works) as (backend,),
        gateway(backend, **{"gateway-workers": workers}) as process,
    ):
        load = Load(process.port)
        clients = [asyncio.create_task(load.client(number)) for number in range(30)]
        await until(lambda: load.served >= 60)
        process.terminate(group=group)
        await process.becomes(503)
        await asyncio.gather(*clients)
        assert await process.exit_code() == 0
        assert load.broken == []
        assert load.served == len(backend.calls)
        assert load.refused
        for each in load.refused:
            assert (each.code, each.header("connection")) == ("shutting_down", "close")
            assert each.header("retry-after") == "1"


async def stays(call: Call) -> None:
    await call.send(SSE_HEAD, event("word"))
    await call.gone()


async def begun(client: Wire) -> None:
    client.send(post(order(stream=True)))
    await client.head()
    assert await client.reader.readexactly(len(event("word"))) == event("word")


async def rest(client: Wire) -> Answer:
    return await client.chunks(200, [("transfer-encoding", "chunked")])


async def test_a_stream_longer_than_the_drain_time_gets_an_error_event() -> None:
    async with (
        backends(stays) as (backend,),
        gateway(backend, **{"drain-timeout-seconds": 0.3}) as process,
        AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(wire(process.port)) for _ in range(8)]
        for client in clients:
            await begun(client)
            # A request sent ahead gets no answer of its own.
            client.send(post())
        process.terminate()
        for client in clients:
            assert (await rest(client)).last_code == "shutting_down"
            assert await client.ended()
        assert await process.exit_code() == 0
        assert len(backend.calls) == 8


async def test_a_second_signal_ends_the_gateway_at_once() -> None:
    async with (
        backends(stays) as (backend,),
        gateway(backend, **{"drain-timeout-seconds": 3600}) as process,
        wire(process.port) as client,
    ):
        await begun(client)
        process.terminate()
        await process.becomes(503)
        # The same signal twice within a moment counts as one: see the drain.
        await asyncio.sleep(REPEAT_S + 0.5)
        assert await process.healthy() == 503
        process.terminate()
        assert (await rest(client)).last_code == "shutting_down"
        assert await process.exit_code() == 0


async def test_a_client_that_does_not_read_does_not_delay_the_end() -> None:
    metrics = HEALTH.replace(b"/v1/health", b"/metrics")
    async with (
        backends(answer("200 OK", b"x" * 8_000_000)) as (backend,),
        gateway(backend) as process,
        slow_reader(process.port) as client,
    ):
        client.send(post())
        await client.head()
        # The gateway has the whole answer; the client has only a part of it.
        while b"gateway_in_flight 1.0" in (await once(process.port, metrics)).raw:
            await client.reader.readexactly(100_000)
        process.terminate()
        assert await process.exit_code() == 0


async def test_an_idle_gateway_ends_with_connections_open() -> None:
    async with (
        backends(answers) as (backend,),
        gateway(backend) as process,
        wire(process.port) as client,
        wire(process.port) as silent,
    ):
        assert (await client.ask()).raw == JSON_BODY
        process.terminate()
        assert await client.ended()
        assert await silent.ended()
        assert await process.exit_code() == 0
