"""Large bodies, slow clients and web pages: the bounds of the gateway, and what still passes."""

import asyncio
import hashlib
import json

import pytest

from gateway.scripted import OK, SSE_HEAD, Call, answer, answers, backends, chunk, sends
from gateway.serving import (
    CHAT,
    KINDS_OF_LOOP,
    once,
    order,
    plan_for,
    post,
    serving,
    slow_reader,
    wire,
)
from proofserve.gateway.exchange import Exchange
from proofserve.gateway.records import Timeouts
from support.pace import until

pytestmark = pytest.mark.anyio

PIECE = 64 * 1024
LOOPS = pytest.mark.parametrize("loop", KINDS_OF_LOOP)


async def stands_still(call: Call) -> int:
    """The bytes that the backend could send before the gateway stopped reading."""
    before = -1
    while call.sent != before:
        before = call.sent
        await asyncio.sleep(0.3)
    return before


# -- back-pressure -------------------------------------------------------------------------------


@LOOPS
async def test_a_client_that_does_not_read_slows_its_backend(loop: str) -> None:
    pieces = [bytes([number % 251]) * PIECE for number in range(512)]

    async def stream(call: Call) -> None:
        await call.send(SSE_HEAD, *map(chunk, pieces), b"0\r\n\r\n")

    timeouts = Timeouts(stall=60.0, total=1e6)
    async with (
        backends(stream) as (backend,),
        serving(plan_for(backend, timeouts=timeouts), loop) as server,
        slow_reader(server.port) as client,
    ):
        client.send(post(order(stream=True)))
        await until(lambda: bool(backend.calls))
        (call,) = backend.calls
        stopped_at = await stands_still(call)
        # The kernel's buffers between client and backend, and a small one in the gateway.
        assert 0 < stopped_at < 16 * 2**20
        (connection,) = server._server.server_state.connections
        assert connection.transport.get_write_buffer_size() < 2**20
        # The client did not read, so the backend has not stalled, however long that takes.
        (exchange,) = server.gateway.deadlines.watched
        assert isinstance(exchange, Exchange)
        later = exchange._began + 1000.0
        assert exchange.deadline(later) == later + timeouts.stall
        await client.head()
        for piece in pieces:
            expected = chunk(piece)
            async with asyncio.timeout(20.0):
                assert await client.reader.readexactly(len(expected)) == expected
        assert await client.reader.readexactly(5) == b"0\r\n\r\n"


@LOOPS
async def test_a_backend_connection_serves_the_next_request_after_a_slow_client(loop: str) -> None:
    # The last bytes are read from the backend while the client takes none: the connection must
    # not keep unread bytes for the next request.
    async with (
        backends(answer("200 OK", b"x" * 8_000_000)) as (backend,),
        serving(plan_for(backend), loop) as server,
        slow_reader(server.port) as client,
    ):
        client.send(post())
        await client.head()
        async with asyncio.timeout(20.0):
            await client.reader.readexactly(8_000_000 - 600_000)
            # The backend has sent everything; the rest waits in the gateway.
            await backend.calls[0].ended.wait()
        await server.settled()
        backend.script = answers
        got = await asyncio.wait_for(once(server.port), 10.0)
        assert got.status == 200


async def test_a_client_that_never_reads_runs_into_the_timeout() -> None:
    async def endless(call: Call) -> None:
        await call.send(SSE_HEAD)
        while True:
            await call.send(chunk(b"data: x\n\n" * 1000))

    async with backends(endless) as (backend,):
        timeouts = Timeouts(total=3.0)
        async with (
            serving(plan_for(backend, timeouts=timeouts)) as server,
            slow_reader(server.port) as client,
        ):
            client.send(post(order(stream=True)))
            await until(lambda: bool(backend.calls))
            await until(backend.calls[0].ended.is_set)
            await server.settled()
            # The gateway does not keep the bytes that the client did not read.
            await until(lambda: server.connections == 0)


# -- large bodies --------------------------------------------------------------------------------


@LOOPS
async def test_large_bodies_pass_in_both_directions(loop: str) -> None:
    async def digest(call: Call) -> None:
        body = hashlib.sha256(call.body).hexdigest().encode() + call.body[-10_000_000:]
        await answer("200 OK", body)(call)

    large = order(user="xyz" * 8_000_000)
    async with backends(digest) as (backend,), serving(plan_for(backend), loop) as server:
        got = await once(server.port, post(large))
        assert got.raw == hashlib.sha256(large).hexdigest().encode() + large[-10_000_000:]


async def test_the_gateway_refuses_a_body_above_the_limit() -> None:
    async with (
        backends(answers) as (backend,),
        serving(plan_for(backend, max_body_bytes=1000)) as server,
        wire(server.port) as client,
    ):
        allowed = order(user="")
        allowed = order(user="x" * (1000 - len(allowed)))
        assert (await client.ask(post(allowed))).status == 200
        got = await client.ask(post(allowed + b" "))
        assert (got.status, got.code) == (413, "body_too_large")
        # Without a Content-Length the gateway counts the bytes.
        head = f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.send(head.encode())
        for _ in range(20):
            client.send(chunk(b"y" * 100))
        got = await client.ask(b"0\r\n\r\n")
        assert (got.status, got.code) == (413, "body_too_large")
        assert (await client.ask()).status == 200
        assert len(backend.calls) == 2


async def test_a_client_with_expect_100_need_not_send_a_body_above_the_limit() -> None:
    async with (
        backends(answers) as (backend,),
        serving(plan_for(backend, max_body_bytes=1000)) as server,
        wire(server.port) as client,
    ):
        request = post(b"x" * 1001, "Expect: 100-continue")
        got = await client.ask(request[: request.index(b"\r\n\r\n") + 4])
        assert (got.status, got.code) == (413, "body_too_large")
        assert got.header("connection") == "close"
        assert await client.ended()


# -- web pages -----------------------------------------------------------------------------------

PAGE = "https://page.example"
OPINION = b"Access-Control-Allow-Origin: https://other.example"


async def test_a_listed_page_may_read_answers_and_errors_whatever_the_backend_says() -> None:
    async with (
        backends(answer("200 OK", b"{}", OPINION, b"Vary: Accept")) as (backend,),
        serving(plan_for(backend, cors_origins=(PAGE,))) as server,
    ):
        for request in (post(order(), f"Origin: {PAGE}"), post(b"[]", f"Origin: {PAGE}")):
            got = await once(server.port, request)
            allowed = [v for n, v in got.headers if n == "access-control-allow-origin"]
            assert allowed == [PAGE]
            assert "Origin" in (got.header("vary") or "")
        for request in (post(order(), "Origin: https://other.example"), post()):
            got = await once(server.port, request)
            assert got.header("access-control-allow-origin") is None
        ask = (
            f"OPTIONS {CHAT} HTTP/1.1\r\nHost: h\r\nOrigin: {PAGE}\r\n"
            "Access-Control-Request-Method: POST\r\n\r\n"
        )
        got = await once(server.port, ask.encode())
        assert (got.status, got.header("access-control-allow-origin")) == (200, PAGE)


async def test_without_listed_pages_the_backend_decides_which_page_may_read() -> None:
    async with (
        backends(answer("200 OK", b"{}", OPINION)) as (backend,),
        serving(plan_for(backend)) as server,
    ):
        got = await once(server.port, post(order(), f"Origin: {PAGE}"))
        assert got.header("access-control-allow-origin") == "https://other.example"


async def test_every_page_may_read_if_all_are_listed() -> None:
    async with (
        backends(sends(OK)) as (backend,),
        serving(plan_for(backend, cors_origins=("*",))) as server,
    ):
        got = await once(server.port, post(order(), f"Origin: {PAGE}"))
        assert got.header("access-control-allow-origin") in (PAGE, "*")
        assert json.loads(got.raw)["usage"]
