"""A node with a fake engine, over real HTTP, with its outbox in a real file."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from proofserve.api.node import Node
from proofserve.api.routes import router
from proofserve.settings.node import NodeSettings
from proofserve.wiring.node import running_node
from support.fake_engine import FakeEngine


@dataclass
class Served:
    """``client`` has no key."""

    node: Node
    engine: FakeEngine
    url: str
    client: httpx.AsyncClient

    async def receipts(self, response_id: str) -> httpx.Response:
        return await self.client.get(f"/api/v1/receipts/{response_id}")


@asynccontextmanager
async def served(
    folder: Path,
    with_receipts: bool = True,
    more: Callable[[FastAPI, Served], None] | None = None,
    **chosen: Any,
) -> AsyncIterator[Served]:
    """``more`` adds routes to the application; ``chosen`` are settings."""
    engine = FakeEngine()
    settings = NodeSettings(enabled=True, outbox=folder / "outbox.sqlite", **chosen)
    source = engine if with_receipts else None
    async with running_node(engine, settings, source) as node:
        if node.receipts is not None:
            node.receipts.wait_s = 0.2
        app = FastAPI()
        app.include_router(router(lambda _: node))
        async with listening(app) as url, httpx.AsyncClient(base_url=url, timeout=60.0) as client:
            made = Served(node, engine, url, client)
            if more is not None:
                more(app, made)
            yield made


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """The address of a server in this event loop."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
