"""Backends that answer each request with a script, byte by byte."""

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from support.pace import PACE, until

MODEL = "tiny"
# Seconds: far more than any step takes on a busy machine.
PATIENCE_S = 60.0 * PACE
JSON_BODY = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}'
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
OK = JSON_HEAD + b"content-length: %d\r\n\r\n%s" % (len(JSON_BODY), JSON_BODY)
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
# A close resets the connection at once.
AT_ONCE = struct.pack("ii", 1, 0)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str) -> bytes:
    """A server-sent event in a chunk of its own, as vLLM sends them."""
    return chunk(f"data: {json.dumps({'text': text})}\n\n".encode())


def reset(writer: asyncio.StreamWriter) -> None:
    """Cut a connection so that the other side sees a reset."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
    writer.transport.abort()


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Call:
    """One request as the backend received it, with methods to answer it."""

    def __init__(
        self,
        head: bytes,
        body: bytes,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.line, _, rest = head.partition(b"\r\n")
        self.headers = [
            (name.lower().decode(), value.decode())
            for name, _, value in (line.partition(b": ") for line in rest.split(b"\r\n") if line)
        ]
        self.body = body
        # The number of earlier requests on this connection.
        self.number = number
        self.sent = 0
        self.ended = asyncio.Event()
        self._reader = reader
        self._writer = writer

    def header(self, name: str) -> list[str]:
        return [value for found, value in self.headers if found == name]

    async def send(self, *parts: bytes) -> None:
        """Send each part after the earlier parts were written to the socket."""
        for part in parts:
            self._writer.write(part)
            await self._writer.drain()
            self.sent += len(part)
            await asyncio.sleep(0)

    async def gone(self) -> None:
        """Wait until the gateway has closed the connection."""
        while await self._reader.read(65536):
            pass

    async def reset(self) -> None:
        """Cut the connection so that the other side sees a reset."""
        reset(self._writer)

    async def close(self) -> None:
        """Close the connection without a reset."""
        self._writer.close()

    async def half_close(self) -> None:
        """Close the sending side and keep reading."""
        self._writer.write_eof()
        await self.gone()


Script = Callable[[Call], Awaitable[None]]


class Backend:
    """Runs its script for every POST, and answers probes as vLLM does."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: list[Call] = []
        self.now = 0
        self.most = 0
        self.connections: set[asyncio.StreamWriter] = set()
        self.accepted = 0
        self.host, self.port = "127.0.0.1", 0
        # The models that /v1/models lists.
        self.models = [MODEL]
        # Whether connections are reset as soon as they are accepted.
        self.hostile = False
        # If set, the backend uses TLS.
        self.tls: ssl.SSLContext | None = None
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, self.host, self.port, backlog=512, ssl=self.tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Stop listening and reset all connections, as a killed process does."""
        if self._server is not None:
            self._server.close()
        for writer in list(self.connections):
            reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.hostile:
            reset(writer)
            return
        self.connections.add(writer)
        number = 0
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET "):
                    writer.write(_probed(head, self.models))
                    break
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                await self._play(Call(head, body, number, reader, writer))
                number += 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.connections.discard(writer)
            writer.close()

    async def _play(self, call: Call) -> None:
        self.calls.append(call)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.script(call)
        finally:
            self.now -= 1
            call.ended.set()


def _probed(head: bytes, models: list[str]) -> bytes:
    body = json.dumps({"object": "list", "data": [{"id": name} for name in models]}).encode()
    if not head.startswith(b"GET /v1/models"):
        body = b""
    return b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )


@asynccontextmanager
async def _running(
    *scripts: Script, tls: ssl.SSLContext | None = None
) -> AsyncIterator[list[Backend]]:
    made = [Backend(script) for script in scripts]
    for backend in made:
        backend.tls = tls
        await backend.start()
    try:
        yield made
    finally:
        for backend in made:
            await backend.die()
        # The handlers of the closed connections end by themselves.
        await until(lambda: not any(backend.connections for backend in made))


def backends(
    *scripts: Script, tls: ssl.SSLContext | None = None
) -> AbstractAsyncContextManager[list[Backend]]:
    """Start one backend for each script."""
    return _running(*scripts, tls=tls)


@contextmanager
def refusing() -> Iterator[str]:
    """A URL that refuses connections until the context ends."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def not_accepting() -> Iterator[str]:
    """A URL that neither accepts nor refuses connections: its backlog is full."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        fillers = [socket.socket() for _ in range(8)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(address)
            yield f"http://127.0.0.1:{address[1]}"
        finally:
            for filler in fillers:
                filler.close()


# -- scripts -----------------------------------------------------------------------------------


async def answers(call: Call) -> None:
    await call.send(OK)


async def silent(call: Call) -> None:
    await call.gone()


async def resets(call: Call) -> None:
    await call.reset()


def sends(*parts: bytes) -> Script:
    """A script that sends the parts and keeps the connection open for the next request."""

    async def script(call: Call) -> None:
        await call.send(*parts)

    return script


def sends_then(then: Callable[[Call], Awaitable[None]], *parts: bytes) -> Script:
    """A script that sends the parts and then runs ``then``."""

    async def script(call: Call) -> None:
        await call.send(*parts)
        await then(call)

    return script


def after(signal: asyncio.Event, script: Script) -> Script:
    """A script that waits for ``signal`` and then runs ``script``."""

    async def wait(call: Call) -> None:
        await signal.wait()
        await script(call)

    return wait


def answer(status: str, body: bytes = b"{}", *headers: bytes) -> Script:
    """A complete answer with a Content-Length."""
    lines = b"".join(line + b"\r\n" for line in headers)
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n".encode()
    return sends(head + lines + b"\r\n" + body)
