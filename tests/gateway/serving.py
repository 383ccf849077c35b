"""The real application on a free port, and clients that read every byte."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import pytest
import uvicorn

from gateway.scripted import MODEL, PATIENCE_S, Backend
from proofserve.gateway.app import build
from proofserve.gateway.backends import Resolve, addresses
from proofserve.gateway.gateway import Gateway
from proofserve.gateway.protocol import GatewayProtocol
from proofserve.gateway.records import BackendSpec, GatewayPlan
from proofserve.gateway.tracing import Traces
from support.pace import until

CHAT = "/v1/chat/completions"
# uvicorn uses uvloop where it is installed, and our requirements install it.
KINDS_OF_LOOP = ["uvloop", pytest.param("asyncio", marks=pytest.mark.slow)]


class Server:
    """A gateway under uvicorn in its own thread."""

    def __init__(
        self,
        plan: GatewayPlan,
        loop: Any = "uvloop",
        keep_alive: float = 60.0,
        resolve: Resolve = addresses,
        traces: Traces | None = None,
    ) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            build(plan, resolve=resolve, traces=traces),
            http=GatewayProtocol,
            ws="none",
            lifespan="on",
            loop=loop,
            access_log=False,
            server_header=False,
            log_level="critical",
            timeout_keep_alive=keep_alive,  # type: ignore[arg-type] # whole seconds are long
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), daemon=True
        )

    @property
    def gateway(self) -> Gateway:
        gateway: Gateway = self._server.lifespan.state["gateway"]
        return gateway

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return len(self._server.server_state.connections)

    async def start(self) -> None:
        self._socket.listen(512)
        self._thread.start()
        await until(lambda: self._server.started or not self._thread.is_alive())
        assert self._server.started

    async def stop(self) -> None:
        self._server.should_exit = True
        await asyncio.to_thread(self._thread.join, PATIENCE_S)
        self._socket.close()
        if self._thread.is_alive():
            left = asyncio.all_tasks(self.gateway.loop)
            raise AssertionError(f"the gateway does not end: {left}")

    def is_settled(self) -> bool:
        """Whether no request holds a permit or is queued, and every backend connection is idle."""
        gateway = self.gateway
        return (
            gateway.admission.in_use == gateway.admission.queued == 0
            and all(client.in_flight == 0 for client in gateway.clients.all())
            and not gateway.deadlines.watched
            and all(
                each.outstanding == 0
                and not each.pool._connecting
                and each.pool.opened == len(each.pool._idle)
                for each in gateway.pool.backends
            )
        )

    async def settled(self) -> None:
        try:
            await until(self.is_settled)
        except TimeoutError:
            gateway = self.gateway
            held = [(b.outstanding, b.pool.opened, b.pool._idle) for b in gateway.pool.backends]
            raise AssertionError(
                f"held: {gateway.admission.in_use} permits, {gateway.admission.queued} queued, "
                f"{len(gateway.deadlines.watched)} exchanges, backends {held}"
            ) from None


def plan_for(*targets: Backend | str, **changes: Any) -> GatewayPlan:
    """A plan whose backends are probed at the start of the gateway, twice, and not again."""
    urls = [target if isinstance(target, str) else target.url for target in targets]
    specs = tuple(BackendSpec(url) for url in urls)
    return GatewayPlan(backends=specs, **{"probe_interval": 3600.0, **changes})


def never_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gateway ask backends that do not answer its probes."""
    monkeypatch.setattr("proofserve.gateway.backends.TIMEOUT_S", 0.1)
    monkeypatch.setattr("proofserve.gateway.backends.FAILURES", 1000)


def never_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a backend that rests after faults rest for the whole test."""
    monkeypatch.setattr("proofserve.gateway.backends.REST_S", 600.0)


@asynccontextmanager
async def serving(
    plan: GatewayPlan,
    loop: Any = "uvloop",
    keep_alive: float = 60.0,
    resolve: Resolve = addresses,
    traces: Traces | None = None,
) -> AsyncIterator[Server]:
    """A running gateway. At the end, assert that it holds no permit, request or connection."""
    server = Server(plan, loop, keep_alive, resolve, traces)
    await server.start()
    try:
        yield server
        await server.settled()
    finally:
        await server.stop()


def order(stream: bool = False, **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "stream": stream, "messages": [], **fields}).encode()


def post(body: bytes | None = None, *headers: str, path: str = CHAT) -> bytes:
    """The bytes of a whole POST."""
    body = order() if body is None else body
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: gateway",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Answer(NamedTuple):
    """An answer as a client received it; ``raw`` contains the framing of the body."""

    status: int
    headers: list[tuple[str, str]]
    raw: bytes
    complete: bool

    def header(self, name: str) -> str | None:
        return next((value for found, value in self.headers if found == name), None)

    @property
    def code(self) -> str | None:
        """The code of an error in OpenAI's shape."""
        error = json.loads(self.raw)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        code: str | None = error["code"]
        return code

    @property
    def text(self) -> bytes:
        """The body without the chunk sizes."""
        if self.header("transfer-encoding") != "chunked":
            return self.raw
        found, rest = [], self.raw
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            found.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        return b"".join(found)

    @property
    def last_code(self) -> str | None:
        """The code of the error in a stream's last event."""
        assert self.complete
        assert self.text.endswith(b"\n\n")
        last = self.text.split(b"\n\n")[-2]
        return Answer(200, [], last.removeprefix(b"data: "), True).code


class Wire:
    """A client's connection that reads bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def ask(self, request: bytes | None = None) -> Answer:
        self.send(post() if request is None else request)
        return await self.answer()

    async def head(self) -> tuple[int, list[tuple[str, str]]]:
        async with asyncio.timeout(PATIENCE_S):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = (line.partition(": ") for line in lines[1:] if line)
        return int(lines[0].split()[1]), [(name.lower(), value) for name, _, value in fields]

    async def answer(self) -> Answer:
        """The next answer; ``complete`` is False if the connection ended before its end."""
        status, headers = await self.head()
        known = dict(headers)
        async with asyncio.timeout(PATIENCE_S):
            try:
                if known.get("transfer-encoding", "").lower() == "chunked":
                    return await self.chunks(status, headers)
                if "content-length" in known:
                    raw = await self.reader.readexactly(int(known["content-length"]))
                else:
                    raw = await self.reader.read()
            except asyncio.IncompleteReadError as error:
                return Answer(status, headers, error.partial, False)
            except ConnectionError:
                return Answer(status, headers, b"", False)
        return Answer(status, headers, raw, True)

    async def chunks(self, status: int, headers: list[tuple[str, str]]) -> Answer:
        """The rest of a chunked answer."""
        raw, size = b"", -1
        try:
            while size != 0:
                line = await self.reader.readuntil(b"\r\n")
                raw += line
                size = int(line, 16)
                raw += await self.reader.readexactly(size + 2)
        except (asyncio.IncompleteReadError, ConnectionError):
            return Answer(status, headers, raw, False)
        return Answer(status, headers, raw, True)

    async def ended(self) -> bool:
        """Whether the gateway closes the connection without another byte."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True

    async def close(self) -> None:
        self.writer.close()
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                await self.writer.wait_closed()


@asynccontextmanager
async def wire(port: int, **options: Any) -> AsyncIterator[Wire]:
    """A connection to a gateway."""
    made = Wire(*await asyncio.open_connection("127.0.0.1", port, limit=2**20, **options))
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def slow_reader(port: int) -> AsyncIterator[Wire]:
    """A client with a small receive buffer, so that the gateway soon has to wait for it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    client = Wire(*await asyncio.open_connection(sock=sock, limit=4096))
    try:
        yield client
    finally:
        client.writer.transport.abort()


async def once(port: int, request: bytes | None = None) -> Answer:
    """Send one request on a new connection and return its answer."""
    async with wire(port) as client:
        return await client.ask(request)
