"""A fast clock, a callback target whose answers a test sets, and small records."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proofserve.outbox.sender import CallbackSender
from proofserve.outbox.store import SqliteOutbox, progress
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import scheme
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.records import RoundProgress, RoundSpec, Winner, Workload
from proofserve.rounds.records import Target as Radius


def a_spec(round_id: str = "r1", url: str | None = None, k_dim: int = 12) -> RoundSpec:
    work = Workload(scheme("artifact-v1", k_dim=k_dim), Block("b10c", 77), "k3y", 256)
    return RoundSpec(round_id, work, NonceLane(3, 4), 32, url)


def artifacts(*nonces: int) -> list[Claim]:
    return [Claim(nonce, f"vector{nonce}") for nonce in nonces]


def a_distance_spec(round_id: str = "d1", url: str | None = None) -> RoundSpec:
    work = Workload(scheme("distance-v1"), Block("b10c", 77), "k3y", 256)
    return RoundSpec(round_id, work, NonceLane(3, 4), 32, url, Radius(1.4))


def winners(*nonces: int) -> list[Winner]:
    """Winners whose distances are float32 values in a float, as the engine gives them."""
    return [Winner(nonce, float(np.float32(1.4 - 1 / (nonce + 3)))) for nonce in nonces]


async def progress_of(store: SqliteOutbox, round_id: str) -> RoundProgress:
    return await store.database.read(progress, round_id)


@dataclass
class HandClock:
    now: float = 1e9

    def __call__(self) -> float:
        return self.now


class FastClock:
    """A wall clock that runs ``speed`` times faster than real time."""

    def __init__(self, speed: float = 100.0) -> None:
        self._speed = speed
        self._started = time.monotonic()

    def __call__(self) -> float:
        return 1e9 + (time.monotonic() - self._started) * self._speed

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._speed)


@dataclass(frozen=True)
class Arrival:
    path: str
    key: str
    sequence: int
    body: dict[str, Any]
    at: float
    headers: Mapping[str, str]


@dataclass
class Target:
    """An HTTP server in a thread. ``answer`` gives the status for an arrival, maybe slowly."""

    url: str
    clock: Callable[[], float]
    answer: Callable[[Arrival], int] = lambda _arrival: 200
    delay_s: float = 0.0
    location: str = "/elsewhere"
    arrivals: list[Arrival] = field(default_factory=list)
    accepted: list[Arrival] = field(default_factory=list)

    async def receive(self, request: Request) -> Response:
        headers = request.headers
        arrival = Arrival(
            request.url.path,
            headers["idempotency-key"],
            int(headers["x-proofserve-sequence"]),
            json.loads(await request.body()),
            self.clock(),
            headers,
        )
        self.arrivals.append(arrival)
        status = self.answer(arrival)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if status < 300:
            self.accepted.append(arrival)
        return Response("so says the target", status, {"location": self.location})

    def nonces(self) -> list[int]:
        """The nonces of accepted callbacks, in the order of arrival."""
        return [nonce for one in self.accepted for nonce in nonces_of(one.body)]


def nonces_of(body: Mapping[str, Any]) -> list[int]:
    """The nonces in a body of either protocol."""
    if "artifacts" in body:
        return [artifact["nonce"] for artifact in body["artifacts"]]
    nonces: list[int] = body["nonces"]
    return nonces


@contextmanager
def running_target(
    clock: Callable[[], float] = time.time, listener: socket.socket | None = None
) -> Iterator[Target]:
    listener = listener or socket.create_server(("127.0.0.1", 0))
    target = Target(f"http://127.0.0.1:{listener.getsockname()[1]}", clock)
    app = Starlette(routes=[Route("/{path:path}", target.receive, methods=["POST", "GET"])])
    with serving(app, listener):
        yield target


@contextmanager
def serving(app: Any, listener: socket.socket) -> Iterator[None]:
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", http="h11")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@asynccontextmanager
async def sending(sender: CallbackSender) -> AsyncIterator[None]:
    task = asyncio.create_task(sender.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
