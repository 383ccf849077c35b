"""Connections to one backend: HTTP/1.1, with bodies passed on unchanged."""

import asyncio
import re
import socket
import ssl
from collections import deque
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from proofserve.gateway.backends.batching import WriteBatch
from proofserve.gateway.failures import (
    BACKEND_BROKE,
    BACKEND_GARBLED,
    CONNECT_TIMEOUT,
    UNREACHABLE,
    Failure,
)

HEAD_BYTES = 64 * 1024
# Size of the kernel's receive buffer, which fills while the client does not read; its default is up
# to 32 MiB a connection. Answers of models are small, so this size does not slow them down.
RECEIVE_BYTES = 512 * 1024
END_OF_HEAD = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\n(?:content-length|transfer-encoding):", re.IGNORECASE)
# uvicorn, and so vLLM, closes a connection after 5 idle seconds: the gateway closes it earlier.
IDLE_S = 3.0


class Connecting(Protocol):
    """Waits for a connection, and uses it until it releases, aborts or returns it unused."""

    def connected(self, upstream: "Upstream") -> None: ...
    def connect_failed(self, failure: Failure) -> None: ...


class Reader(Protocol):
    """Waits for the answer to the request that was sent.

    ``head`` comes without its final empty line, ``data`` of the body with its framing.
    """

    def answer_begins(self, status: int, head: bytes, data: bytes, complete: bool) -> None: ...
    def answer_goes_on(self, data: bytes, complete: bool) -> None: ...
    def answer_broken(self, failure: Failure) -> None: ...


class Upstream(asyncio.Protocol):
    """One connection. An exchange that uses it sends one request and reads one answer."""

    _transport: asyncio.Transport

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._reader: Reader | None = None
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

    def send(self, reader: Reader, head: bytes, body: bytes | bytearray) -> None:
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
        self._transport = self._pool.writes.to_backend(cast("asyncio.Transport", transport))
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
            self._give_up(BACKEND_GARBLED)
            return
        # A second answer to one request: no client may get any byte of it.
        if self._messages > 1:
            self._give_up(BACKEND_GARBLED)
        elif self._in_head:
            self._head_received(reader, data)
        else:
            reader.answer_goes_on(data, self._complete)

    def _head_received(self, reader: Reader, data: bytes) -> None:
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
                self._give_up(BACKEND_GARBLED)
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
            reader.answer_broken(BACKEND_BROKE)

    def _give_up(self, failure: Failure) -> None:
        reader, self._reader = cast("Reader", self._reader), None
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


class Pool:
    """The connections to one backend; idle ones stay for ``IDLE_S``, the newest is used first."""

    def __init__(
        self, url: str, connect_s: float, loop: asyncio.AbstractEventLoop, writes: WriteBatch
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

    def acquire(self, waiting: Connecting, fresh: bool = False) -> None:
        """Give ``waiting`` an idle connection at once or, also if ``fresh``, a new one later."""
        while self._idle and not fresh:
            upstream = self._idle.pop()
            if not upstream.closing():
                waiting.connected(upstream)
                return
        task = self._loop.create_task(self._connect(waiting))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, waiting: Connecting) -> None:
        loop, upstream = self._loop, Upstream(self)
        try:
            async with asyncio.timeout(self._connect_s):
                if self._unix is not None:
                    await loop.create_unix_connection(lambda: upstream, self._unix)
                else:
                    await loop.create_connection(lambda: upstream, *self._address, ssl=self._tls)
        except TimeoutError:
            waiting.connect_failed(CONNECT_TIMEOUT)
        except OSError as error:
            waiting.connect_failed(UNREACHABLE.saying(f"{UNREACHABLE.message} ({error.strerror})"))
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
