"""Writes that wait for the end of a turn of the loop, on real sockets with asyncio and uvloop."""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from gateway.scripted import AT_ONCE, PATIENCE_S
from proofserve.gateway.connections import LARGE, BatchedTransport, WriteBatch
from support.pace import until

pytestmark = pytest.mark.anyio
Batched = Callable[[WriteBatch, asyncio.Transport], asyncio.Transport]
TO_CLIENT: Batched = partial(WriteBatch.batched, to_client=True)
TO_BACKEND: Batched = partial(WriteBatch.batched, to_client=False)


@pytest.fixture(params=["uvloop", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


class RecordingProtocol(asyncio.Protocol):
    """A protocol that records the transport's calls."""

    def __init__(self) -> None:
        self.paused = self.resumed = 0
        self.lost = asyncio.Event()

    def pause_writing(self) -> None:
        self.paused += 1

    def resume_writing(self) -> None:
        self.resumed += 1

    def connection_lost(self, _exc: Exception | None) -> None:
        self.lost.set()


class Line:
    """A connection: the test writes to ``transport`` and reads from ``peer``."""

    def __init__(
        self, transport: asyncio.Transport, told: RecordingProtocol, peer: socket.socket
    ) -> None:
        self.transport = transport
        self.told = told
        self.peer = peer

    def arrived(self) -> bytes:
        """The bytes received so far."""
        try:
            return self.peer.recv(2**20)
        except BlockingIOError:
            return b""

    async def everything(self) -> bytes:
        """All bytes until the transport is closed."""
        loop, found = asyncio.get_running_loop(), bytearray()
        async with asyncio.timeout(PATIENCE_S):
            while data := await loop.sock_recv(self.peer, 2**16):
                found += data
        return bytes(found)


@asynccontextmanager
async def line(batch: WriteBatch, batched: Batched = TO_CLIENT) -> AsyncIterator[Line]:
    loop, listener = asyncio.get_running_loop(), socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    peer, _ = listener.accept()
    listener.close()
    peer.setblocking(False)
    raw, told = await loop.create_connection(RecordingProtocol, sock=ours)
    try:
        yield Line(batched(batch, cast("asyncio.Transport", raw)), told, peer)
    finally:
        if not told.lost.is_set():
            raw.abort()
        peer.close()
        await told.lost.wait()


@pytest.fixture
async def batch() -> WriteBatch:
    return WriteBatch(asyncio.get_running_loop())


@pytest.fixture
def vectors(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bytes]]:
    """The writes as (socket, bytes), in order."""
    seen, writev = [], os.writev

    def watched(number: int, parts: Sequence[bytes]) -> int:
        seen.append((number, b"".join(parts)))
        return writev(number, parts)

    monkeypatch.setattr(os, "writev", watched)
    return seen


def number_of(connection: Line) -> int:
    number: int = connection.transport.get_extra_info("socket").fileno()
    return number


async def test_the_first_write_of_a_turn_leaves_at_once_and_the_others_at_its_end(
    batch: WriteBatch, vectors: list[tuple[int, bytes]]
) -> None:
    async with line(batch) as first, line(batch) as one:
        for _ in range(2):
            first.transport.write(b"1")
            assert first.arrived() == b"1"
            one.transport.write(b"a")
            one.transport.writelines([b"b", bytearray(b"c")])
            one.transport.write(memoryview(b"d"))
            assert one.arrived() == b""
            await asyncio.sleep(0)
            assert one.arrived() == b"abcd"
        assert vectors == [(number_of(first), b"1"), (number_of(one), b"abcd")] * 2


async def test_backends_are_written_before_clients_and_equals_in_order(
    batch: WriteBatch, vectors: list[tuple[int, bytes]]
) -> None:
    async with (
        line(batch) as first,
        line(batch) as client,
        line(batch) as another,
        line(batch, TO_BACKEND) as backend,
        line(batch, TO_BACKEND) as other,
    ):
        for number, each in enumerate((first, client, backend, another, other)):
            each.transport.write(b"%d" % number)
        await asyncio.sleep(0)
        assert [number for number, _ in vectors] == [
            number_of(each) for each in (first, backend, other, client, another)
        ]


async def test_a_slow_reader_gets_every_byte_and_the_protocol_is_paused(
    batch: WriteBatch, vectors: list[tuple[int, bytes]]
) -> None:
    pieces = [bytes([number]) * 2**18 for number in range(64)]
    async with line(batch) as one:
        for piece in pieces:
            one.transport.write(piece)
            await asyncio.sleep(0)
        assert one.told.paused == 1
        assert one.transport.get_write_buffer_size() > 0
        # While the transport has a queue, no write may pass it.
        assert len(vectors) < len(pieces)
        one.transport.close()
        assert await one.everything() == b"".join(pieces)
        assert one.told.resumed == 1


async def test_a_slow_reader_is_known_before_the_turn_reads_more(batch: WriteBatch) -> None:
    async with line(batch) as one:
        for _ in range(1000):
            one.transport.write(bytes(LARGE + 1))
            if one.told.paused:
                break
        assert one.told.paused == 1
        assert one.transport.get_write_buffer_size() <= 2 * LARGE


@given(
    turns=st.lists(st.lists(st.integers(0, 2**17), min_size=1, max_size=4), max_size=12),
    loop=st.sampled_from([asyncio.new_event_loop, uvloop.new_event_loop]),
)
def test_bytes_arrive_once_and_in_order_whatever_their_size(
    turns: list[list[int]], loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def write_and_read() -> None:
        said = bytearray()
        async with line(WriteBatch(asyncio.get_running_loop())) as one:
            for turn in turns:
                for size in turn:
                    part = struct.pack("<I", len(said)) * (size // 4 + 1)
                    one.transport.write(part)
                    said += part
                await asyncio.sleep(0)
            one.transport.close()
            assert await one.everything() == said

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(write_and_read())


async def test_bytes_written_before_a_close_arrive(batch: WriteBatch) -> None:
    async with line(batch) as first, line(batch) as one:
        first.transport.write(b"hello")
        one.transport.write(b"goodbye")
        one.transport.close()
        assert one.transport.is_closing()
        assert await one.everything() == b"goodbye"


async def test_bytes_written_before_an_abort_do_not_arrive(
    batch: WriteBatch, vectors: list[tuple[int, bytes]]
) -> None:
    async with line(batch) as first, line(batch) as one:
        first.transport.write(b"hello")
        one.transport.write(b"never")
        one.transport.abort()
        await one.told.lost.wait()
        assert vectors == [(number_of(first), b"hello")]


async def test_a_closed_socket_is_not_written_to(
    batch: WriteBatch, vectors: list[tuple[int, bytes]]
) -> None:
    async with line(batch) as other, line(batch) as one:
        assert isinstance(one.transport, BatchedTransport)
        other.transport.write(b"hello")
        one.transport.write(b"for one that left")
        # As when the loop itself finds that the peer has closed.
        one.transport._transport.abort()
        other.transport.write(b"for one that stayed")
        await asyncio.sleep(0)
        both = [b"hello", b"for one that stayed"]
        assert vectors == [(number_of(other), text) for text in both]


async def test_a_broken_connection_is_reported_and_delays_no_other(batch: WriteBatch) -> None:
    async with line(batch) as broken, line(batch) as whole:
        broken.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        broken.peer.close()
        broken.transport.write(b"?")
        whole.transport.write(b"!")
        await until(broken.told.lost.is_set)
        assert whole.arrived() == b"!"


async def test_the_transport_reads_by_itself(batch: WriteBatch) -> None:
    async with line(batch) as one:
        transport = one.transport
        assert isinstance(transport, BatchedTransport)
        transport.pause_reading()
        assert not transport._transport.is_reading()
        transport.resume_reading()
        assert transport._transport.is_reading()
        assert transport.get_extra_info("peername") == one.peer.getsockname()
        assert transport.get_extra_info("no such thing", 7) == 7
