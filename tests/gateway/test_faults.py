"""Faults of a backend: another one answers before the first byte, or the client gets an error."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.scripted import (
    END,
    JSON_BODY,
    OK,
    SSE_HEAD,
    Backend,
    Call,
    Script,
    answer,
    answers,
    backends,
    chunk,
    event,
    not_accepting,
    refusing,
    resets,
    sends_then,
    silent,
)
from gateway.serving import (
    KINDS_OF_LOOP,
    Answer,
    Server,
    never_unhealthy,
    once,
    order,
    plan_for,
    post,
    serving,
    wire,
)
from proofserve.gateway.records import Timeouts
from support.pace import until

pytestmark = pytest.mark.anyio

LOOPS = pytest.mark.parametrize("loop", KINDS_OF_LOOP)
HALF = b"HTTP/1.1 200 OK\r\ncontent-le"
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"

# Before the first byte: what the only backend does, and the client's status and code.
BROKEN: dict[str, tuple[Script, str]] = {
    "reset": (resets, "backend_broke"),
    "closed": (Call.close, "backend_broke"),
    "half-closed": (Call.half_close, "backend_broke"),
    "reset in the head": (sends_then(Call.reset, HALF), "backend_broke"),
    "closed in the head": (sends_then(Call.close, HALF), "backend_broke"),
    "closed after an interim head": (
        sends_then(Call.close, b"HTTP/1.1 100 Continue\r\n\r\n"),
        "backend_broke",
    ),
    "garbage": (sends_then(silent, b"\x00\xff SMTP ready\r\n"), "backend_garbled"),
    "a head without an end": (
        sends_then(silent, b"HTTP/1.1 200 OK\r\n", *[b"a: %s\r\n" % (b"b" * 8000)] * 10),
        "backend_garbled",
    ),
    "two answers": (sends_then(silent, OK + OK), "backend_garbled"),
    "another protocol": (sends_then(silent, SWITCH), "backend_garbled"),
}
# After the first byte of a stream.
BROKEN_OFF: dict[str, tuple[Script, str]] = {
    "reset": (resets, "backend_broke"),
    "closed": (Call.close, "backend_broke"),
    "half-closed": (Call.half_close, "backend_broke"),
    "garbage": (sends_then(silent, b"no length of a chunk\r\n"), "backend_garbled"),
}


def each(table: dict[str, tuple[Script, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("script", "code"), table.values(), ids=list(table))


@pytest.fixture(scope="module", params=KINDS_OF_LOOP)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Backend, Server]]:
    async with backends(answers) as (backend,), serving(plan_for(backend), request.param) as server:
        yield backend, server


@pytest.fixture
async def pair(running: tuple[Backend, Server]) -> AsyncIterator[tuple[Backend, Server]]:
    """One backend and a gateway in front of it. At the end, assert that nothing is held."""
    backend, server = running
    yield running
    await nothing_is_held(server, backend)


async def nothing_is_held(server: Server, *targets: Backend) -> None:
    await server.settled()
    for backend, known in zip(targets, server.gateway.pool.backends, strict=True):
        assert known.name == backend.url
        await until(lambda b=backend, k=known: len(b.connections) == k.pool.opened and b.now == 0)


async def stream(port: int) -> Answer:
    return await once(port, post(order(stream=True)))


# -- one backend -----------------------------------------------------------------------------------


@each(BROKEN)
async def test_a_fault_before_the_first_byte_gives_an_error_with_its_code(
    pair: tuple[Backend, Server], script: Script, code: str
) -> None:
    backend, server = pair
    backend.script = script
    async with wire(server.port) as client:
        got = await client.ask()
        assert (got.status, got.code) == (502, code)
        # The client's connection still works.
        backend.script = answers
        assert (await client.ask()).raw == JSON_BODY


@each(BROKEN_OFF)
async def test_a_fault_between_two_events_gives_an_error_event_and_ends_the_stream(
    pair: tuple[Backend, Server], script: Script, code: str
) -> None:
    backend, server = pair
    begun = event("one") + event("two")
    passed = asyncio.Event()

    async def breaks(call: Call) -> None:
        await call.send(SSE_HEAD, begun)
        await passed.wait()
        await script(call)

    backend.script = breaks
    async with wire(server.port) as client:
        client.send(post(order(stream=True)))
        await client.head()
        assert await client.reader.readexactly(len(begun)) == begun
        passed.set()
        assert (await client.chunks(200, [("transfer-encoding", "chunked")])).last_code == code
        assert await client.ended()


async def test_a_fault_after_the_head_of_a_stream_gives_one_error_event(
    pair: tuple[Backend, Server],
) -> None:
    backend, server = pair
    backend.script = sends_then(Call.close, SSE_HEAD)
    got = await stream(server.port)
    assert (got.status, got.last_code) == (200, "backend_broke")


@pytest.mark.parametrize(
    "parts",
    [
        (SSE_HEAD, event("one"), event("two")[:-6]),
        (SSE_HEAD, event("one"), b"4"),
        (SSE_HEAD.replace(b"text/event-stream", b"application/json"), chunk(b"[1,\n\n")),
        (OK[:-1],),
        (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n", JSON_BODY[:9]),
    ],
    ids=["in an event", "in a chunk", "in chunked JSON", "in JSON", "in JSON without a length"],
)
async def test_a_fault_elsewhere_closes_the_clients_connection(
    pair: tuple[Backend, Server], parts: tuple[bytes, ...]
) -> None:
    backend, server = pair
    passed = asyncio.Event()

    async def breaks(call: Call) -> None:
        await call.send(*parts)
        await passed.wait()
        await call.reset()

    backend.script = breaks
    async with wire(server.port) as client:
        client.send(post(order(stream=True)))
        await until(lambda: bool(client.reader._buffer))
        passed.set()
        assert not (await client.answer()).complete


@pytest.mark.parametrize(
    "status", ["400 Bad Request", "429 Too Many Requests", "500 Oops", "503 X"]
)
async def test_the_gateway_relays_an_error_of_the_only_backend(
    pair: tuple[Backend, Server], status: str
) -> None:
    backend, server = pair
    backend.script = answer(status, b'{"error":{"code":"theirs"}}', b"Retry-After: 7")
    for _ in range(5):
        got = await once(server.port)
        assert f"{got.status}" == status[:3]
        assert (got.raw, got.header("retry-after")) == (b'{"error":{"code":"theirs"}}', "7")


async def test_an_idle_backend_connection_that_ends_is_replaced_without_a_fault(
    pair: tuple[Backend, Server],
) -> None:
    backend, server = pair

    async def once_only(call: Call) -> None:
        await (answers(call) if call.number == 0 else call.reset())

    backend.script = once_only
    got = await asyncio.gather(*(once(server.port) for _ in range(20)))
    got += [await once(server.port) for _ in range(20)]
    assert [each.raw for each in got] == [JSON_BODY] * 40
    assert server.gateway.totals.retries["stale_connection"] >= 20


async def test_a_backend_connection_that_is_reset_at_once_is_not_waited_for(
    pair: tuple[Backend, Server],
) -> None:
    backend, server = pair
    backend.script = resets
    await once(server.port)
    backend.hostile = True
    got = await asyncio.gather(*(once(server.port) for _ in range(50)))
    backend.hostile = False
    assert {each.status for each in got} == {502}
    assert {each.code for each in got} <= {"backend_broke", "backend_unreachable"}


@LOOPS
async def test_a_refused_backend_connection_gives_an_error_with_its_code(loop: str) -> None:
    with refusing() as url:
        async with serving(plan_for(url), loop) as server:
            got = await once(server.port)
            assert (got.status, got.code) == (502, "backend_unreachable")
            assert got.header("retry-after") == "1"


# -- timeouts --------------------------------------------------------------------------------------


async def sends_slowly_for_ever(call: Call) -> None:
    await call.send(SSE_HEAD)
    while True:
        await call.send(event("drop"))
        await asyncio.sleep(0.02)


@LOOPS
async def test_every_timeout_has_its_own_code(loop: str) -> None:
    cases: list[tuple[str, int, str, Script]] = [
        ("first_byte", 504, "first_byte_timeout", silent),
        ("first_byte", 504, "first_byte_timeout", sends_then(silent, HALF)),
        ("total", 504, "total_timeout", silent),
    ]
    for name, status, code, script in cases:
        timeouts = Timeouts(**{name: 0.3})
        async with (
            backends(script) as (backend,),
            serving(plan_for(backend, timeouts=timeouts), loop) as server,
        ):
            got = await once(server.port)
            assert (got.status, got.code) == (status, code)
            await nothing_is_held(server, backend)
    in_stream: list[tuple[Timeouts, str, Script]] = [
        (Timeouts(stall=0.5), "stall_timeout", sends_then(silent, SSE_HEAD, event("one"))),
        (Timeouts(total=3.0), "total_timeout", sends_slowly_for_ever),
    ]
    for timeouts, code, script in in_stream:
        async with (
            backends(script) as (backend,),
            serving(plan_for(backend, timeouts=timeouts), loop) as server,
        ):
            assert (await stream(server.port)).last_code == code
            await nothing_is_held(server, backend)


async def test_the_gateway_gives_up_a_backend_that_does_not_accept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never_unhealthy(monkeypatch)
    with not_accepting() as url:
        timeouts = Timeouts(connect=0.3)
        async with serving(plan_for(url, timeouts=timeouts)) as server:
            got = await once(server.port)
            assert (got.status, got.code) == (504, "connect_timeout")


async def test_the_gateway_gives_up_a_request_that_does_not_arrive() -> None:
    async with (
        backends(answers) as (backend,),
        serving(plan_for(backend, timeouts=Timeouts(total=0.3))) as server,
        wire(server.port) as client,
    ):
        got = await client.ask(post()[:-1])
        assert (got.status, got.code) == (408, "receive_timeout")
        assert await client.ended()
        assert backend.calls == []


async def test_a_wait_for_a_permit_ends_in_time_with_retry_after() -> None:
    timeouts = Timeouts(queue=0.3)
    async with (
        backends(silent) as (backend,),
        serving(plan_for(backend, timeouts=timeouts, max_concurrent=1)) as server,
        wire(server.port) as first,
    ):
        first.send(post())
        await until(lambda: backend.now == 1)
        got = await once(server.port)
        assert (got.status, got.code) == (503, "queue_timeout")
        assert got.header("retry-after") == "1"
        assert len(backend.calls) == 1


async def test_a_slow_answer_does_not_count_as_stalled() -> None:
    async def drips(call: Call) -> None:
        await call.send(SSE_HEAD)
        for _ in range(9):
            await call.send(event("drop"))
            await asyncio.sleep(0.45)
        await call.send(END)

    async with (
        backends(drips) as (backend,),
        serving(plan_for(backend, timeouts=Timeouts(first_byte=3.5, stall=3.5))) as server,
    ):
        assert (await stream(server.port)).raw == event("drop") * 9 + END
