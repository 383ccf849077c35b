"""A node and a receiver over real HTTP and SQLite, and rounds that publish roots. No model."""

import asyncio
import json
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from anyio.from_thread import start_blocking_portal
from fastapi import FastAPI
from numpy.typing import NDArray
from starlette.types import ASGIApp

from outbox.support import serving
from proofserve.api.routes import router
from proofserve.protocol.identity import Block
from proofserve.protocol.schemes import scheme
from proofserve.receiver.app import create_app
from proofserve.receiver.store import ReceiverStore
from proofserve.rounds.records import ProofBatch, Workload
from proofserve.settings.node import NodeSettings
from proofserve.verifier.claims import Selection
from proofserve.verifier.openings import CommittedSource, read_committed
from proofserve.wiring.node import running_node
from support.fake_engine import FakeEngine
from support.pace import wait_until

ORDER: dict[str, Any] = {
    "block_hash": "block",
    "block_height": 7,
    "public_key": "key",
    "node_id": 1,
    "node_count": 3,
    "params": {"model": "toy", "seq_len": 16, "k_dim": 12},
    "batch_size": 32,
    "commit": "roots",
}
ANYTHING = Selection()


@dataclass(frozen=True)
class FakeNode:
    """A node that listens; ``outbox`` is its SQLite file."""

    url: str
    outbox: Path
    http: httpx.Client

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return self.http.post(path, json=body)

    def open(self, **changes: Any) -> httpx.Response:
        return self.post("/open", {"block_hash": "block", "public_key": "key", **changes})

    def generate(self, url: str, nonces: int, **changes: Any) -> int:
        """Run a round for at least ``nonces``; returns how many it has computed."""
        response = self.post("/init/generate", {**ORDER, "url": url, **changes})
        assert response.status_code == 200, response.text
        wait_until(lambda: self.computed() >= nonces)
        assert self.post("/stop", {}).status_code == 200
        return self.computed()

    def computed(self) -> int:
        stats = self.http.get("/status").json()["stats"]
        return int(stats["total_processed"]) + int(stats["failed"])

    def change(self, sql: str, *values: Any) -> None:
        """Change the file beside the running node."""
        with closing(sqlite3.connect(self.outbox)) as file, file:
            assert file.execute(sql, values).rowcount > 0


@contextmanager
def fake_node(
    folder: Path,
    engine: FakeEngine | None = None,
    key: str | None = None,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    **settings: Any,
) -> Iterator[FakeNode]:
    """``key`` is that of ``http``; what ``around`` makes of the application is served."""
    outbox = folder / "outbox.sqlite"
    chosen = {"enabled": True, "outbox": outbox, "callback_interval_sec": 0.05, **settings}
    head = {"Authorization": f"Bearer {key}"} if key else {}
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        running = _listening(engine or slow_engine(), NodeSettings(**chosen), around)
        url = stack.enter_context(portal.wrap_async_context_manager(running))
        base = f"{url}/api/v1/pow"
        http = stack.enter_context(httpx.Client(base_url=base, headers=head, timeout=30))
        yield FakeNode(url, outbox, http)


def slow_engine() -> FakeEngine:
    """Computes some thousand nonces a second: without a pause a round would fill the disk."""
    made = FakeEngine()
    made.latency_s = 0.005
    return made


@asynccontextmanager
async def _listening(
    engine: FakeEngine, settings: NodeSettings, around: Callable[[ASGIApp], ASGIApp]
) -> AsyncIterator[str]:
    app = FastAPI()
    # As vLLM's own server has it.
    models = {"data": [{"id": name} for name in engine.engine_info.model_names]}
    app.add_api_route("/v1/models", lambda: models)
    async with running_node(engine, settings) as node:
        app.include_router(router(lambda _: node))
        server = uvicorn.Server(
            uvicorn.Config(around(app), lifespan="off", ws="none", log_config=None)
        )
        with socket.create_server(("127.0.0.1", 0)) as listening:
            # A client that connects before the server is ready waits in the socket's backlog.
            running = asyncio.create_task(server.serve(sockets=[listening]))
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
            server.should_exit = True
            await running


@dataclass(frozen=True)
class Receiver:
    url: str
    file: Path
    store: ReceiverStore

    def committed(self) -> int:
        return sum(source.committed for source in self.store.summary().sources)

    def roots(self, round_id: str | None = None) -> CommittedSource:
        return read_committed(self.file, ANYTHING, round_id)


@contextmanager
def receiver(folder: Path) -> Iterator[Receiver]:
    file = folder / "received.sqlite"
    store = ReceiverStore.open(file)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with serving(create_app(store), listener):
        yield Receiver(url, file, store)
    store.close()


def recomputed(nonces: Sequence[int]) -> Mapping[int, NDArray[np.float32]]:
    """The vectors of an honest node with the fake engine."""
    work = Workload(scheme("artifact-v1"), Block("block", 7), "key", 16)
    batch = asyncio.run(FakeEngine().answer(work, nonces))
    assert isinstance(batch, ProofBatch)
    return dict(zip(batch.nonces, batch.values, strict=True))


def as_json(file: Path, source: CommittedSource, roots: Sequence[Mapping[str, Any]]) -> Path:
    """The roots of a round in the form of one callback."""
    lane = source.lane
    body = {
        "block_hash": source.block.hash,
        "block_height": source.block.height,
        "public_key": source.public_key,
        "node_id": lane.node_id,
        "node_count": lane.node_count,
        "group_id": lane.group_id,
        "n_groups": lane.n_groups,
        "round_id": source.round_id,
        "scheme": source.scheme,
        "encoding": {"dtype": "f16", "k_dim": source.width, "endian": "le"},
        "params": {"seq_len": source.seq_len},
        "roots": list(roots),
    }
    file.write_text(json.dumps(body))
    return file
