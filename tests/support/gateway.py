"""A gateway as its users and its operator see it: HTTP, metrics, signals, an exit code."""

import asyncio
import json
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from proofserve.cli.servers import ServerOptions, small_server
from proofserve.settings.process import environment
from proofserve.wiring.launch import Server, ServerCommand, free_port, running_server
from support.gateway_requests import CHAT, chat
from support.node import DTYPE, IN_ONE_PROCESS, NAME
from support.pace import PACE

# The backend takes as many requests as the gateway sends: all waiting happens in the gateway.
SEATS = ("--max-num-seqs", "256")
# An answer of so many tokens is at work for longer than any test, on the fastest machine too.
ENDLESS = 15_000
ROOM = (*("--max-model-len", "16384"), *("--hf-overrides", '{"max_position_embeddings": 16384}'))
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
# Without this limit a small model writes blanks between two tokens of JSON until its token limit.
DENSE_JSON = (
    "--structured-outputs-config",
    '{"backend": "xgrammar", "disable_any_whitespace": true}',
)
# At vLLM: those it works on, and those it has yet to begin.
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
IN_FLIGHT, QUEUED = "gateway_in_flight", "gateway_queued"
CONNECTIONS = "gateway_backend_connections"
ENDED, GRANTED = "gateway_requests_total", "gateway_queue_wait_seconds_count"
WAITED = "gateway_queue_wait_seconds_sum"
# The engine has workers that take their time on a busy machine.
END_S = 240.0 * PACE
# Beside other tests a real engine answers slowly: no test here is about these limits.
PATIENT: dict[str, object] = {
    "request_timeout_seconds": 600,
    "first_byte_timeout_seconds": 600,
    "drain_timeout_seconds": 200,
}


@dataclass(frozen=True)
class ServedGateway:
    """A running gateway, and how to reach the vLLM behind it without it."""

    server: Server
    vllm_url: str
    embedded: bool

    @property
    def url(self) -> str:
        return self.server.url

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30.0)

    def metric(self, name: str) -> float:
        """The sum of a metric's series, of the gateway."""
        return metric_in(self.get("/metrics").text, name)

    def directly(self) -> httpx.Client:
        """A client of the vLLM behind."""
        return httpx.Client(**reaching(self.vllm_url, httpx.HTTPTransport), timeout=60.0)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.server.process.pid).children(recursive=True)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit code after a signal."""
        self.server.process.send_signal(number)
        return self.server.process.wait(END_S)


def reaching(url: str, transport: Any) -> dict[str, Any]:
    """What httpx wants in order to reach a server, behind a unix socket or not."""
    if url.startswith("unix:"):
        return {"base_url": "http://vllm", "transport": transport(uds=url.removeprefix("unix:"))}
    return {"base_url": url}


def metric_in(text: str, name: str) -> float:
    found = [line for line in text.splitlines() if line.partition("{")[0].split()[:1] == [name]]
    return sum(float(line.split()[-1]) for line in found)


@contextmanager
def gateway_process(folder: Path, env: Mapping[str, str], **variables: object) -> Iterator[Server]:
    """``proofserve gateway`` with these VLLM_ variables."""
    ours = {f"VLLM_{name.upper()}": str(value) for name, value in variables.items()}
    argv = (sys.executable, "-m", "proofserve", "gateway")
    log = folder / f"gateway-{free_port()}.log"
    command = ServerCommand(argv, {**env, "VLLM_PROBE_INTERVAL_SECONDS": "0.5", **ours})
    with running_server(command, free_port(), log) as server:
        yield server


@contextmanager
def two_processes(model: Path, folder: Path) -> Iterator[ServedGateway]:
    """A vLLM server, and a gateway in front of it."""
    with _server_of(model, folder) as command:
        log = folder / "vllm.log"
        with (
            running_server(command, free_port(), log) as vllm,
            gateway_process(folder, environment({}), backend_url=vllm.url, **PATIENT) as server,
        ):
            yield ServedGateway(server, vllm.url, embedded=False)


@contextmanager
def embedded(model: Path, folder: Path) -> Iterator[ServedGateway]:
    """A gateway with the same vLLM in its own process."""
    with _server_of(model, folder) as command:
        options = command.argv[command.argv.index("--model") + 2 :]
        own: dict[str, object] = {
            "use_embedded_engine": "true",
            "model": model,
            "engine_options": shlex.join(options),
        }
        with gateway_process(folder, command.env, **own, **PATIENT) as server:
            (backend,) = httpx.get(f"{server.url}/admin/backends").json()
            yield ServedGateway(server, backend["backend"], embedded=True)


@contextmanager
def _server_of(model: Path, folder: Path) -> Iterator[ServerCommand]:
    command = small_server(ServerOptions(model, NAME, forward_batch=8, dtype=DTYPE), folder)
    argv = (*command.argv, *IN_ONE_PROCESS, *SEATS, *ROOM, *TOOLS, *DENSE_JSON)
    # vLLM's sockets live there, and the path of a socket must be short; a test's folder is long.
    with TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as sockets:
        yield replace(command, argv=argv, env={**command.env, "TMPDIR": sockets})


@contextmanager
def in_front_of(
    served: ServedGateway, folder: Path, **variables: object
) -> Iterator[ServedGateway]:
    """One more gateway to the same engine, with settings of its own."""
    env = environment({})
    with gateway_process(folder, env, backend_url=served.vllm_url, **variables) as server:
        yield ServedGateway(server, served.vllm_url, embedded=False)


@dataclass(slots=True)
class Reply:
    """What became of one request; ``status`` 0 before there is any answer."""

    status: int = 0
    headers: httpx.Headers | None = None
    body: bytes = b""
    seconds: float = 0.0
    whole: bool = False

    @property
    def finished(self) -> bool:
        """Whether it is a complete answer of the model's."""
        if self.status != 200 or not self.whole:
            return False
        if self.body.startswith(b"data:"):
            return self.body.endswith(b"data: [DONE]\n\n")
        return bool(json.loads(self.body)["choices"])


class Users:
    """Many users of one gateway, in one event loop."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(**reaching(url, httpx.AsyncHTTPTransport), limits=limits)
        self._http.timeout = httpx.Timeout(120.0)

    async def __aenter__(self) -> "Users":
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._http.aclose()

    async def ask(self, body: Mapping[str, Any], reply: Reply | None = None) -> Reply:
        """Ask; ``reply`` has what came of it even if this is cancelled."""
        reply, began = reply or Reply(), time.monotonic()
        try:
            async with self._http.stream("POST", CHAT, json=body) as response:
                reply.status, reply.headers = response.status_code, response.headers
                async for part in response.aiter_raw():
                    reply.body += part
                reply.whole = True
        except httpx.TransportError:
            pass
        reply.seconds = time.monotonic() - began
        return reply

    async def metrics(self, *names: str) -> tuple[float, ...]:
        """Metrics page of a gateway or a backend."""
        text = (await self._http.get("/metrics")).text
        return tuple(metric_in(text, name) for name in names)

    async def until_held(self, *, in_flight: int, queued: int, seconds: float) -> None:
        """Wait for so many requests of the gateway at vLLM, and so many in its queue."""

        async def held() -> bool:
            return await self.metrics(IN_FLIGHT, QUEUED) == (in_flight, queued)

        await until(held, seconds)


async def ask_alone(url: str, body: Mapping[str, Any]) -> Reply:
    """Ask on a bare socket: where time is the point, a client of our weight is in its way."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\n"
    began = time.monotonic()
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    answer, _, text = (await reader.read()).partition(b"\r\n\r\n")
    seconds = time.monotonic() - began
    writer.close()
    await writer.wait_closed()
    status, *lines = answer.decode().split("\r\n")
    headers = httpx.Headers(dict(line.split(": ", 1) for line in lines))
    if headers.get("transfer-encoding") == "chunked":
        text, whole = without_chunks(text)
    else:
        whole = len(text) == int(headers["content-length"])
    return Reply(int(status.split()[1]), headers, text, seconds, whole)


def without_chunks(raw: bytes) -> tuple[bytes, bool]:
    """A chunked body's content, and whether it came to its end."""
    parts = []
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return b"".join(parts), raw == b"\r\n"
        parts.append(raw[:length])
        raw = raw[length + 2 :]
    return b"".join(parts), False


class Peaks:
    """The highest values that metrics had while the context went on.

    A thread looks: the loop of many users would not come to it.
    """

    def __init__(self, url: str, *names: str) -> None:
        self._http = httpx.Client(**reaching(url, httpx.HTTPTransport), timeout=30.0)
        self._names = names
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.values = [0.0] * len(names)
        self.total = 0.0

    def __enter__(self) -> "Peaks":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._enough.set()
        self._thread.join()
        self._http.close()

    def _look(self) -> None:
        while not self._enough.wait(0.02):
            text = self._http.get("/metrics").text
            now = [metric_in(text, name) for name in self._names]
            self.values = [max(pair) for pair in zip(self.values, now, strict=True)]
            self.total = max(self.total, sum(now))


@dataclass(frozen=True)
class Burst:
    """The answers of many users, and the most requests that ran at a time.

    ``waited`` is how long they queued, all waits together, seconds.
    """

    replies: list[Reply]
    at_vllm: float
    in_flight: float
    queued: float
    waited: float


async def burst(served: ServedGateway, count: int) -> Burst:
    """So many streaming users at once."""
    before = served.metric(WAITED)
    with (
        Peaks(served.vllm_url, RUNNING, WAITING) as there,
        Peaks(served.url, IN_FLIGHT, QUEUED) as here,
    ):
        asked = [ask_alone(served.url, chat(24, about=i, stream=True)) for i in range(count)]
        replies = await asyncio.gather(*asked)
    after = served.metric(WAITED)
    seen = Burst(replies, there.total, *here.values, waited=after - before)
    print(f"{count} users: {seen.at_vllm:.0f} at vLLM, {here.values}, {seen.waited:.1f} s waited")
    return seen


class Heartbeat:
    """How long this machine stood still, as seen by a task that wakes every 10 ms."""

    def __init__(self) -> None:
        self.lost = 0.0

    async def __aenter__(self) -> "Heartbeat":
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            self.lost += max(0.0, time.monotonic() - before - 0.015)


async def until(condition: Callable[[], Any], seconds: float) -> float:
    """Seconds until an async ``condition`` came true, less those in which nothing ran."""
    began = time.monotonic()
    async with Heartbeat() as heart:
        while not await condition():
            taken = time.monotonic() - began - heart.lost
            assert taken < seconds * PACE, f"the condition did not come true within {seconds} s"
            await asyncio.sleep(0.01)
    return time.monotonic() - began - heart.lost
