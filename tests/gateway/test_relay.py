"""The relay: every byte of an answer, the right headers, in order and within the limits."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator

import pytest

from gateway.scripted import (
    END,
    JSON_BODY,
    OK,
    SSE_HEAD,
    Backend,
    Call,
    answer,
    backends,
    chunk,
    event,
    sends,
)
from gateway.serving import CHAT, KINDS_OF_LOOP, Server, once, order, plan_for, post, serving, wire
from proofserve.gateway.exchange import Exchange
from proofserve.gateway.records import ClientSpec
from support.pace import until

pytestmark = pytest.mark.anyio

STREAM = [event("one"), event("two"), chunk(b": a comment\n\n"), event("\u00fc" * 5000), END]


async def echo(call: Call) -> None:
    """Answer with the request line, the headers and the size of the body."""
    text = {"line": call.line.decode(), "headers": call.headers, "size": len(call.body)}
    await answer("200 OK", json.dumps(text).encode())(call)


@pytest.fixture(scope="module", params=KINDS_OF_LOOP)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Backend, Server]]:
    async with backends(echo) as (backend,), serving(plan_for(backend), request.param) as server:
        yield backend, server


@pytest.fixture
async def pair(running: tuple[Backend, Server]) -> AsyncIterator[tuple[Backend, Server]]:
    """A backend that echoes requests, and a gateway in front of it."""
    backend, server = running
    backend.script = echo
    backend.calls.clear()
    backend.most = 0
    yield running
    await server.settled()


# -- answers -------------------------------------------------------------------------------------


async def test_the_gateway_relays_an_answer_byte_for_byte(pair: tuple[Backend, Server]) -> None:
    backend, server = pair
    body = bytes(range(256)) * 3
    backend.script = answer("418 I'm a Teapot", body, b"x-own: a, b", b"Set-Cookie: c=d")
    got = await once(server.port)
    assert (got.status, got.raw, got.complete) == (418, body, True)
    assert got.header("x-own") == "a, b"
    assert got.header("set-cookie") == "c=d"


async def test_the_gateway_relays_a_stream_with_its_framing(pair: tuple[Backend, Server]) -> None:
    backend, server = pair
    backend.script = sends(SSE_HEAD, *STREAM)
    async with wire(server.port) as client:
        for _ in range(2):
            got = await client.ask(post(order(stream=True)))
            assert got.raw == b"".join(STREAM)
            assert got.header("content-type") == "text/event-stream; charset=utf-8"


async def test_the_gateway_relays_an_event_before_the_next_one_exists(
    pair: tuple[Backend, Server],
) -> None:
    backend, server = pair
    go_on = asyncio.Event()

    async def waits(call: Call) -> None:
        await call.send(SSE_HEAD, STREAM[0])
        await go_on.wait()
        await call.send(STREAM[1], END)

    backend.script = waits
    async with wire(server.port) as client:
        client.send(post(order(stream=True)))
        await client.head()
        assert await client.reader.readexactly(len(STREAM[0])) == STREAM[0]
        go_on.set()
        rest = STREAM[1] + END
        assert await client.reader.readexactly(len(rest)) == rest


async def test_the_client_gets_the_same_answer_however_it_is_split(
    pair: tuple[Backend, Server],
) -> None:
    backend, server = pair
    whole = SSE_HEAD + b"".join(STREAM[:3]) + END
    backend.script = sends(*(whole[at : at + 1] for at in range(len(whole))))
    got = await once(server.port, post(order(stream=True)))
    assert got.raw == whole.removeprefix(SSE_HEAD)
    backend.script = sends(whole)
    assert (await once(server.port, post(order(stream=True)))).raw == got.raw


@pytest.mark.parametrize("count", [1, 2, 2000])
async def test_the_gateway_does_not_relay_1xx_heads(
    pair: tuple[Backend, Server], count: int
) -> None:
    backend, server = pair
    hints = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" * count
    for parts in ([hints + OK], [hints, OK]):
        backend.script = sends(*parts)
        got = await once(server.port)
        assert (got.status, got.raw) == (200, JSON_BODY)


async def test_an_answer_that_ends_with_its_connection_closes_the_clients_connection(
    pair: tuple[Backend, Server],
) -> None:
    backend, server = pair

    async def until_close(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n", b"so ", b"long")
        await call.close()

    backend.script = until_close
    async with wire(server.port) as client:
        got = await client.ask()
        assert (got.raw, got.header("connection")) == (b"so long", "close")
        assert await client.ended()


async def test_an_answer_without_a_body_leaves_both_connections_open(
    pair: tuple[Backend, Server],
) -> None:
    backend, server = pair
    backend.script = sends(b"HTTP/1.1 204 No Content\r\n\r\n")
    async with wire(server.port) as client:
        for _ in range(2):
            client.send(post())
            assert (await client.head())[0] == 204
    first, second = backend.calls
    assert second.number == first.number + 1


# -- requests ------------------------------------------------------------------------------------


async def test_the_backend_gets_the_request_with_its_headers_and_body(
    pair: tuple[Backend, Server],
) -> None:
    _, server = pair
    request = post(
        order(user="\u00fc"),
        "Authorization: Bearer of the backend",
        "X-Custom: Yes",
        "Accept-Encoding: gzip",
        "Connection: keep-alive",
        "Keep-Alive: timeout=5",
        "Proxy-Connection: keep-alive",
        "TE: trailers",
        "X-Request-Id: mine-1",
        path=f"{CHAT}?beta=1&x=%20y",
    )
    got = await once(server.port, request)
    heard = json.loads(got.raw)
    assert heard["line"] == f"POST {CHAT}?beta=1&x=%20y HTTP/1.1"
    assert heard["size"] == len(order(user="\u00fc"))
    assert sorted(map(tuple, heard["headers"])) == [
        ("accept-encoding", "gzip"),
        ("authorization", "Bearer of the backend"),
        ("content-length", str(heard["size"])),
        ("content-type", "application/json"),
        ("host", server.gateway.pool.backends[0].name.removeprefix("http://")),
        ("x-custom", "Yes"),
        ("x-request-id", "mine-1"),
    ]
    assert got.header("x-request-id") == "mine-1"


async def test_an_ended_request_is_freed_without_the_garbage_collector(
    pair: tuple[Backend, Server],
) -> None:
    _, server = pair
    gc.collect()
    gc.disable()
    try:
        for stream in (False, True):
            await once(server.port, post(order(stream=stream)))
        await until(lambda: not [each for each in gc.get_objects() if isinstance(each, Exchange)])
    finally:
        gc.enable()


async def test_every_request_has_its_own_id(pair: tuple[Backend, Server]) -> None:
    backend, server = pair
    unfit = post(order(), "X-Request-Id: two words")
    ids = [(await once(server.port, request)).header("x-request-id") for request in [None, unfit]]
    assert len(set(ids)) == 2
    assert ids == [call.header("x-request-id")[0] for call in backend.calls]


async def test_the_backend_gets_its_own_key_and_not_the_clients() -> None:
    async with backends(echo) as (backend,):
        clients = (ClientSpec(name="one", key="secret"),)
        async with serving(plan_for(backend, clients=clients)) as server:
            got = await once(server.port, post(order(), "Authorization: Bearer secret"))
            assert "authorization" not in dict(json.loads(got.raw)["headers"])
            several = ["Authorization: Bearer other", "Authorization: Bearer secret"]
            for lines in ([], several[:1], ["Authorization: secret"], several):
                refused = await once(server.port, post(order(), *lines))
                assert (refused.status, refused.code) == (401, "invalid_api_key")
        async with serving(plan_for(backend, backend_key="inner")) as server:
            got = await once(server.port, post(order(), "Authorization: Bearer outer"))
            assert dict(json.loads(got.raw)["headers"])["authorization"] == "Bearer inner"
            assert got.raw.count(b"Bearer") == 1


async def test_a_body_may_come_in_chunks(pair: tuple[Backend, Server]) -> None:
    backend, server = pair
    body = order(user="x" * 1000)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    async with wire(server.port) as client:
        client.send(head)
        for part in (body[:7], body[7:600], body[600:]):
            client.send(chunk(part))
            await asyncio.sleep(0.01)
        got = await client.ask(b"0\r\n\r\n")
        assert json.loads(got.raw)["size"] == len(body)
        assert backend.calls[0].body == body
        assert backend.calls[0].header("transfer-encoding") == []


async def test_a_client_with_expect_100_is_told_to_continue(pair: tuple[Backend, Server]) -> None:
    _, server = pair
    request = post(order(), "Expect: 100-continue")
    head, _, body = request.partition(b"\r\n\r\n")
    async with wire(server.port) as client:
        client.send(head + b"\r\n\r\n")
        assert (await client.head())[0] == 100
        assert (await client.ask(body)).status == 200


async def test_100_continue_is_never_sent_inside_another_answer(
    pair: tuple[Backend, Server],
) -> None:
    backend, server = pair
    go_on = asyncio.Event()

    async def waits(call: Call) -> None:
        await call.send(SSE_HEAD, STREAM[0])
        await go_on.wait()
        await call.send(END)

    backend.script = waits
    async with wire(server.port) as client:
        client.send(post() + post(order(), "Expect: 100-continue").partition(b"{")[0])
        await until(lambda: len(backend.calls) == 1)
        await client.head()
        await client.reader.readexactly(len(STREAM[0]))
        go_on.set()
        assert await client.reader.readexactly(len(END)) == END
        assert (await client.head())[0] == 100
        assert (await client.ask(order())).raw == STREAM[0] + END


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": 3}'])
async def test_the_gateway_refuses_an_invalid_body_and_does_not_relay_it(
    pair: tuple[Backend, Server], body: bytes
) -> None:
    backend, server = pair
    async with wire(server.port) as client:
        got = await client.ask(post(body))
        assert (got.status, got.code) == (400, "invalid_body")
        assert (await client.ask()).status == 200
    assert len(backend.calls) == 1


async def test_a_request_without_a_length_has_no_body(pair: tuple[Backend, Server]) -> None:
    _, server = pair
    got = await once(server.port, f"POST {CHAT} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    assert (got.status, got.code) == (400, "invalid_body")


async def test_the_gateway_refuses_an_unknown_model(pair: tuple[Backend, Server]) -> None:
    backend, server = pair
    got = await once(server.port, post(order(model="other")))
    assert (got.status, got.code) == (404, "model_not_found")
    assert backend.calls == []


# -- connections ---------------------------------------------------------------------------------


async def test_requests_sent_ahead_are_answered_in_order(pair: tuple[Backend, Server]) -> None:
    backend, server = pair
    health = b"GET /v1/health HTTP/1.1\r\nHost: h\r\n\r\n"
    sizes = [10, 5000, 100_000, 0, 20]
    requests = [post(order(user="x" * size)) for size in sizes]
    async with wire(server.port) as client:
        client.send(requests[0] + requests[1] + health + requests[2] + post(b"[]") + health)
        client.send(requests[3] + requests[4])
        got = [await client.answer() for _ in range(8)]
    expected = [len(order(user="x" * size)) for size in sizes]
    bodies = [json.loads(each.raw) for each in got]
    assert [bodies[at]["size"] for at in (0, 1, 3, 6, 7)] == expected
    assert [bodies[at] for at in (2, 5)] == [{"status": "ok"}] * 2
    assert got[4].code == "invalid_body"
    assert backend.most == 1


async def test_the_gateway_closes_a_connection_if_the_client_asks_for_it(
    pair: tuple[Backend, Server],
) -> None:
    _, server = pair
    async with wire(server.port) as client:
        got = await client.ask(post(order(), "Connection: close"))
        assert (got.status, got.header("connection")) == (200, "close")
        assert await client.ended()


async def test_an_http_1_0_client_gets_its_answer_and_the_connection_closes(
    pair: tuple[Backend, Server],
) -> None:
    _, server = pair
    async with wire(server.port) as client:
        got = await client.ask(post().replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (got.status, got.header("connection")) == (200, "close")
        assert json.loads(got.raw)["line"].endswith("HTTP/1.1")
        assert await client.ended()


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
async def test_the_gateway_relays_only_post(pair: tuple[Backend, Server], method: str) -> None:
    backend, server = pair
    request = f"{method} {CHAT} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode()
    async with wire(server.port) as client:
        client.send(request)
        assert (await client.head())[0] == 405
    assert backend.calls == []


async def test_the_gateway_reuses_backend_connections(pair: tuple[Backend, Server]) -> None:
    backend, server = pair
    await once(server.port)
    before = backend.accepted
    for _ in range(5):
        await once(server.port)
    assert backend.accepted == before
    await asyncio.gather(*(once(server.port) for _ in range(10)))
    await server.settled()
    assert len(backend.connections) == server.gateway.pool.backends[0].pool.opened
