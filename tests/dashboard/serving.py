"""Servers with a page, each under uvicorn in a thread of its own, which may end and start again."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute

from proofserve.api import routes as node_routes
from proofserve.api.dashboard import dashboard_routes
from proofserve.api.node import Node
from proofserve.dashboard import routes
from proofserve.dashboard.feed import SnapshotFeed
from proofserve.dashboard.records import DashboardSnapshot
from proofserve.engines.fake import FakeEngine
from proofserve.settings.node import NodeSettings
from proofserve.wiring.node import running_node

# Seconds between two events: the pages of tests need not wait as long as a person's.
QUICK_S = 0.25
PATIENCE_S = 30.0


class PageServer:
    """Serves what ``make`` makes at an address that stays the same over restarts."""

    def __init__(self, make: Callable[[], FastAPI], **config: Any) -> None:
        self._make = make
        self._config = {"ws": "none", "log_level": "critical", "server_header": False, **config}
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

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
        until(lambda: server.started)

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


def until(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


class ServedNode:
    """The real API of a node over the fake engine, with its page. Tests change ``engine``."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.engine = FakeEngine()
        self.engine.latency_s = 0.02
        self.node: Node | None = None
        self._settings = NodeSettings(
            enabled=True, dashboard=True, outbox=folder / "outbox.sqlite", **settings
        )
        self.server = PageServer(self._app)

    def _app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            async with running_node(self.engine, self._settings) as node:
                assert node.dashboard is not None
                node.dashboard._interval_s = QUICK_S
                self.node = node
                yield

        app = FastAPI(lifespan=lifespan)

        def get_node(_: Request) -> Node:
            assert self.node is not None
            return self.node

        app.include_router(node_routes.router(get_node))
        app.include_router(dashboard_routes.router(get_node))
        return app


class HandedIn:
    """A page that shows what a test puts into ``snapshot``, or fails as ``error`` says."""

    def __init__(self, snapshot: DashboardSnapshot, **feed: Any) -> None:
        self.snapshot = snapshot
        self.error: Exception | None = None
        self.read_s = 0.0
        self.feed = SnapshotFeed(self._read, **{"interval_s": QUICK_S, **feed})
        self.server = PageServer(self._app)

    async def _read(self) -> DashboardSnapshot:
        await asyncio.sleep(self.read_s)
        if self.error is not None:
            raise self.error
        return self.snapshot

    def _app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(routes.router(lambda _: self.feed, APIRoute))
        return app
