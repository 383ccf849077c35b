"""Connections to one backend, and the writes of one turn of the event loop.

Connections speak HTTP/1.1 and pass bodies on unchanged. Their writes are collected, first those to
backends, then those to clients: so a reading process is woken once for all of them (ADR 15).
"""

import asyncio
import os
import re
import socket
import ssl
from collections import deque
from collections.abc import Iterable
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from proofserve.gateway import failures
from proofserve.gateway.failures import Failure

HEAD_BYTES = 64 * 1024
# Size of the kernel's receive buffer, which fills while the client does not read; its default is up
# to 32 MiB a connection. Answers of models are small, so this size does not slow them down.
RECEIVE_BYTES = 512 * 1024
END_OF_HEAD = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\n(?:content-length|transfer-encoding):", re.IGNORECASE)
# uvicorn, and so vLLM, closes a connection after 5 idle seconds: the gateway closes it earlier.
IDLE_S = 3.0
# Types that os.writev accepts.
Data = bytes | bytearray | memoryview
# Bytes of a part above which it is written at once: one turn of the loop may read megabytes from a
# backend, and back-pressure of the client must act before all are read.
LARGE = 64 * 1024
# Methods that each wrapper takes from its transport: a wrapping method costs more than the call.
UNCHANGED = (
    "abort",
    "get_extra_info",
    "get_write_buffer_size",
    "is_closing",
    "pause_reading",
    "resume_reading",
)


class Requester(Protocol):
    """Has a request to send on a connection, and reads its answer.

    ``head`` comes without its final empty line, ``data`` of the body with its framing.
    """

    def connected(self, upstream: "Upstream") -> None: ...
    def connect_failed(self, failure: Failure) -> None: ...
    def answer_begins(self, status: int, head: bytes, data: bytes, complete: bool) -> None: ...
    def answer_goes_on(self, data: bytes, complete: bool) -> None: ...
    def answer_broken(self, failure: Failure) -> None: ...


class Upstream(asyncio.Protocol):
    """One connection. An exchange that uses it sends one request and reads one answer."""

    _transport: asyncio.Transport

    def __init__(self, pool: "ConnectionPool") -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._reader: Requester | None = None
        self._head = b""
        self._in_head = True
        self._status = 0
        self._keep_alive = False
        self._messages = 0
        self._complete = False
        self._interim = 0
        self.until_close = False
        self.used = False
        self.silent = True
        self._paused = False
        self.idle_since = 0.0

    # -- the reader's side --------------------------------------------------------------------

    def send(self, reader: Requester, head: bytes, body: bytes | bytearray) -> None:
        self._reader = reader
        self._head, self._in_head, self._messages = b"", True, 0
        self._complete = self.until_close = False
        self.silent = True
        self._transport.writelines([head, body])

    def pause(self) -> None:
        """Read no more until ``resume``: the client reads more slowly than the backend writes."""
        self._paused = True
        self._transport.pause_reading()

    def resume(self) -> None:
        self._paused = False
        self._transport.resume_reading()

    def release(self) -> None:
        """The exchange has ended: keep the connection if the answer is complete, else close it."""
        self._reader = None
        if self._keep_alive and self._complete and not self.closing():
            self.used = True
            if self._paused:
                # The client had not read the last bytes of the answer yet.
                self.resume()
            self._pool.put_back(self)
        else:
            self.abort()

    def return_unused(self) -> None:
        """Nothing was sent: another request may have the connection."""
        self._pool.put_back(self)

    def abort(self) -> None:
        """Close the connection at once, so that the backend ends the request."""
        self._reader = None
        self._transport.abort()

    # -- asyncio's side ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._pool.writes.batched(
            cast("asyncio.Transport", transport), to_client=False
        )
        self.closing = self._transport.is_closing
        self._pool.opened += 1
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)

    def data_received(self, data: bytes) -> None:
        """Pass the data on. Close the connection if it has no request."""
        reader = self._reader
        if reader is None:
            self.abort()
            return
        self.silent = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._give_up(failures.BACKEND_GARBLED)
            return
        # A second answer to one request: no client may get any byte of it.
        if self._messages > 1:
            self._give_up(failures.BACKEND_GARBLED)
        elif self._in_head:
            self._head_received(reader, data)
        else:
            reader.answer_goes_on(data, self._complete)

    def _head_received(self, reader: Requester, data: bytes) -> None:
        head, rest = self._head + data, b""
        while (end := head.find(END_OF_HEAD)) >= 0:
            head, rest = head[:end], head[end + len(END_OF_HEAD) :]
            if not self._interim:
                break
            # An interim head such as "100 Continue": the final head follows.
            self._interim -= 1
            head = rest
        else:
            self._head = head
            if len(head) > HEAD_BYTES:
                self._give_up(failures.BACKEND_GARBLED)
            return
        self._in_head, self._head = False, b""
        if not self._keep_alive:
            self.until_close = _LENGTH.search(head) is None
        reader.answer_begins(self._status, head, rest, self._complete)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.opened -= 1
        self._pool.forget(self)
        reader = self._reader
        if reader is None or self._complete:
            return
        self._reader = None
        # Without a length and without chunks an answer ends with its connection.
        if exc is None and self.until_close and not self._in_head:
            self._complete = True
            reader.answer_goes_on(b"", True)
        else:
            reader.answer_broken(failures.BACKEND_BROKE)

    def _give_up(self, failure: Failure) -> None:
        reader, self._reader = cast("Requester", self._reader), None
        self._transport.abort()
        reader.answer_broken(failure)

    # -- the parser's side -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._messages += 1

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._keep_alive = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        if self._status < 200:
            self._messages -= 1
            self._interim += 1
        else:
            self._complete = True


class ConnectionPool:
    """The connections to one backend; idle ones stay for ``IDLE_S``, the newest is used first."""

    def __init__(
        self, url: str, connect_s: float, loop: asyncio.AbstractEventLoop, writes: "WriteBatch"
    ) -> None:
        self.writes = writes
        parts = urlsplit(url)
        self.host = parts.netloc.encode() or b"localhost"
        self._unix = parts.path if parts.scheme == "unix" else None
        self._address = (
            parts.hostname or "localhost",
            parts.port or (443 if parts.scheme == "https" else 80),
        )
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_s = connect_s
        self._loop = loop
        self._idle: deque[Upstream] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self.opened = 0

    def acquire(self, waiting: Requester, fresh: bool = False) -> None:
        """Give ``waiting`` an idle connection at once or, also if ``fresh``, a new one later."""
        while self._idle and not fresh:
            upstream = self._idle.pop()
            if not upstream.closing():
                waiting.connected(upstream)
                return
        task = self._loop.create_task(self._connect(waiting))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, waiting: Requester) -> None:
        loop, upstream = self._loop, Upstream(self)
        try:
            async with asyncio.timeout(self._connect_s):
                if self._unix is not None:
                    await loop.create_unix_connection(lambda: upstream, self._unix)
                else:
                    await loop.create_connection(lambda: upstream, *self._address, ssl=self._tls)
        except TimeoutError:
            waiting.connect_failed(failures.CONNECT_TIMEOUT)
        except OSError as error:
            failure = failures.UNREACHABLE
            waiting.connect_failed(failure.saying(f"{failure.message} ({error.strerror})"))
        else:
            waiting.connected(upstream)

    def put_back(self, upstream: Upstream) -> None:
        upstream.idle_since = self._loop.time()
        self._idle.append(upstream)

    def forget(self, upstream: Upstream) -> None:
        if upstream in self._idle:
            self._idle.remove(upstream)

    def drop_idle(self, now: float) -> None:
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            self._idle.popleft().abort()

    def close(self) -> None:
        for task in self._connecting:
            task.cancel()
        while self._idle:
            self._idle.popleft().abort()


class WriteBatch:
    """The transports that have something to write in this turn of ``loop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._to_backends: list[BatchedTransport] = []
        self._to_clients: list[BatchedTransport] = []
        self._due = False

    def batched(self, transport: asyncio.Transport, to_client: bool) -> asyncio.Transport:
        """``transport``, to a client or to a backend, with writes that go with the batch."""
        queue = self._to_clients if to_client else self._to_backends
        raw = transport.get_extra_info("socket")
        if raw is None or transport.get_extra_info("sslcontext") is not None:
            # With TLS only the transport knows the bytes on the socket.
            return transport
        return BatchedTransport(transport, raw.fileno(), queue, self)

    def postpone(self, transport: "BatchedTransport", queue: "list[BatchedTransport]") -> bool:
        """Flush ``transport`` at the end of the turn. False for the first: it writes at once.

        The process that reads it must wake up in any case, and does so while this loop continues.
        """
        if self._due:
            queue.append(transport)
            return True
        self._due = True
        self._loop.call_soon(self._write)
        return False

    def _write(self) -> None:
        self._due = False
        ready = [*self._to_backends, *self._to_clients]
        self._to_backends.clear()
        self._to_clients.clear()
        for transport in ready:
            transport.flush()


class BatchedTransport(asyncio.Transport):
    """A transport whose writes go to the socket together with those of other transports.

    This is correct while the transport's own queue is empty. Bytes that the socket does not accept
    go through the transport, so back-pressure and lost connections are reported as usual.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        socket: int,
        queue: "list[BatchedTransport]",
        batch: WriteBatch,
    ) -> None:
        super().__init__()
        self._transport = transport
        self._socket = socket
        self._queue = queue
        self._batch = batch
        self._parts: list[Data] = []
        for name in UNCHANGED:
            setattr(self, name, getattr(transport, name))

    def write(self, data: Data) -> None:
        """Write with the batch; large ``data`` at once. It must not change until it is written."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Data]) -> None:
        """Write all parts with the batch, without a copy."""
        parts = self._parts
        waits = parts or self._batch.postpone(self, self._queue)
        parts += list_of_data
        if not waits or (parts and len(parts[-1]) > LARGE):
            self.flush()

    def flush(self) -> None:
        parts, self._parts = self._parts, []
        # The socket number of a closing transport may already belong to another connection.
        if not parts or self.is_closing():
            return
        written = 0
        if not self.get_write_buffer_size():
            try:
                written = os.writev(self._socket, parts)
            except OSError:
                # The socket is full or broken: the transport finds out itself.
                written = 0
        if written < sum(map(len, parts)):
            self._transport.writelines(_after(written, parts))

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()


def _after(written: int, parts: list[Data]) -> list[Data]:
    """The bytes of ``parts`` after the first ``written``, without a copy."""
    for number, part in enumerate(parts):
        if written < len(part):
            return [memoryview(part)[written:], *parts[number + 1 :]]
        written -= len(part)
    return []
