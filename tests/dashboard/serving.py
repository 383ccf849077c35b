"""Servers with a page, each under uvicorn in a thread of its own, which may end and start again."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute

from proofserve.api import node_page
from proofserve.api import routes as node_routes
from proofserve.api.node import Node
from proofserve.api.node_page import NodeHistory
from proofserve.dashboard import routes
from proofserve.dashboard.records import DashboardSnapshot
from proofserve.dashboard.routes import SnapshotFeed
from proofserve.rounds.records import Deferred, ProofBatch, Workload
from proofserve.rounds.status import CoreLiveness, EngineGauges
from proofserve.settings.node import NodeSettings
from proofserve.wire import PROOFS
from proofserve.wiring.launch import free_port
from proofserve.wiring.node import running_node
from support.fake_engine import TOY_ENGINE_INFO, TOY_FACTS, FakeEngine
from support.pace import PACE, wait_until

ROUND = {
    "block_hash": "0x8f2e41c09ab7",
    "block_height": 912_344,
    "public_key": "gonka1q8k7w0e5t",
    "node_id": 3,
    "node_count": 48,
    "params": {"model": "Qwen/Qwen3-32B", "seq_len": 256, "k_dim": 12},
}
# Seconds between two events: the pages of tests need not wait as long as a person's.
QUICK_S = 0.25
PATIENCE_S = 30.0 * PACE


class PageServer:
    """Serves what ``make`` makes at an address that stays the same over restarts."""

    def __init__(self, make: Callable[[], FastAPI], **config: Any) -> None:
        self._make = make
        self._config = {"ws": "none", "log_level": "critical", "server_header": False, **config}
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def state(self) -> dict[str, Any]:
        """What the application's lifespan gave to its requests."""
        assert self._server is not None
        return self._server.lifespan.state

    def start(self) -> None:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", self.port))
        config = uvicorn.Config(
            self._make(), lifespan="on", timeout_graceful_shutdown=1, **self._config
        )
        self._server = server = uvicorn.Server(config)
        self._thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        self._thread.start()
        wait_until(lambda: server.started)

    def stop(self) -> float:
        """Seconds that the end took."""
        assert self._server is not None
        assert self._thread is not None
        began = time.monotonic()
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server does not end"
        return time.monotonic() - began

    @contextmanager
    def running(self) -> Iterator["PageServer"]:
        self.start()
        try:
            yield self
        finally:
            self.stop()


ENGINE_INFO = replace(
    TOY_ENGINE_INFO,
    model_names=("Qwen/Qwen3-32B",),
    facts=replace(TOY_FACTS, weights_digest=sha256(b"weights").hexdigest()),
    versions={"proofserve": "0.1.0", "vllm": "0.33.0"},
)


class BusyEngine(FakeEngine):
    """The fake engine, with the gauges of one that has chat, too."""

    def __init__(self) -> None:
        super().__init__(ENGINE_INFO)
        self.latency_s = 0.1
        self.hangs = False
        """Whether nothing that is asked from now on is answered."""

    async def answer(
        self, work: Workload, nonces: Sequence[int], core: int = 0
    ) -> ProofBatch | Deferred:
        await self._while_it_hangs()
        return await super().answer(work, nonces, core)

    async def _while_it_hangs(self) -> None:
        while self.hangs:  # noqa: ASYNC110 - the test sets it in another thread
            await asyncio.sleep(0.05)

    async def gauges(self) -> EngineGauges:
        await self._while_it_hangs()
        found = await super().gauges()
        return replace(
            found,
            busy_s=found.forwards * 0.041,
            deferred_s=found.forwards * 0.013,
            last_forward_s=0.0412,
            longest_chat_wait_s=0.0437,
            free_blocks=9216 - 64,
            leased_blocks=64,
            unfinished_requests=7,
        )


class ServedNode:
    """The real API of a node over the fake engine, with its page.

    Tests change ``engine``, and ``cores``, the progress of the engine's cores.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.engine = BusyEngine()
        self.cores = (CoreLiveness(0),)
        self.node: Node | None = None
        self._settings = NodeSettings(
            enabled=True, dashboard=True, outbox=folder / "outbox.sqlite", **settings
        )
        self.server = PageServer(self._app)

    @property
    def history(self) -> NodeHistory:
        assert self.node is not None
        feed: Any = self.node.dashboard
        history: NodeHistory = feed.read.args[1]
        return history

    @property
    def processed(self) -> int:
        assert self.node is not None
        stats = self.node.manager.status().stats
        return stats.total_processed if stats is not None else 0

    def call(self, path: str, body: Any = None, key: str | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.post(
            f"{self.server.url}{PROOFS}{path}", json=body, headers=headers, timeout=60
        )

    def start_round(self, key: str | None = None) -> None:
        answer = self.call("/init/generate", ROUND, key)
        assert answer.status_code == 200, answer.text

    def _app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            running = running_node(self.engine, self._settings, liveness=lambda: self.cores)
            async with running as node:
                assert node.dashboard is not None
                node.dashboard.interval_s = QUICK_S
                self.node = node
                yield

        app = FastAPI(lifespan=lifespan)

        def get_node(_: Request) -> Node:
            assert self.node is not None
            return self.node

        app.include_router(node_routes.router(get_node))
        app.include_router(node_page.router(get_node))
        return app


class HandedIn:
    """A page that shows what a test puts into ``snapshot``, or fails as ``error`` says."""

    def __init__(self, snapshot: DashboardSnapshot, **feed: Any) -> None:
        self.snapshot = snapshot
        self.error: Exception | None = None
        self.held = False
        """Whether a reading waits."""
        self.feed = SnapshotFeed(self._read, **{"interval_s": QUICK_S, **feed})
        self.server = PageServer(self._app)

    async def _read(self) -> DashboardSnapshot:
        while self.held:  # noqa: ASYNC110 - set by the thread of the test
            await asyncio.sleep(0.05)
        if self.error is not None:
            raise self.error
        return self.snapshot

    def _app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(routes.router(lambda _: self.feed, APIRoute))
        return app
