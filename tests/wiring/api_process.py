"""One API process of a server with several, on a fake engine: in this process or as one of its own.

``python api_process.py SERVER PORT`` serves until SIGTERM; its settings are the variables POC_….
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from fastapi import APIRouter, FastAPI

from proofserve.api.node import Node
from proofserve.api.routes import router
from proofserve.settings.node import NodeSettings
from proofserve.wiring.access import access_of
from proofserve.wiring.node import running_node
from proofserve.wiring.owner import ForwardingRoute, Ownership
from support.fake_engine import FakeEngine


class ApiProcess:
    """``taken_over`` counts how often this process became the owner; ``rounds_resume`` says how."""

    def __init__(self, settings: NodeSettings, server: str) -> None:
        self.engine = FakeEngine(cores=2)
        self.engine.latency_s = 0.002
        self.taken_over = 0
        self._settings = settings
        self.ownership = Ownership(settings.outbox, server, self._start)
        self.app = FastAPI()
        forwarding = ForwardingRoute(
            lambda: self.ownership, access_of(settings), settings.max_body_bytes
        )
        self.app.router.routes.append(forwarding)
        self.app.include_router(router(lambda _: self._own_node()))

    def _own_node(self) -> Node:
        node = self.ownership.node
        assert node is not None, "a request came to a process that does not own the node"
        return node

    @asynccontextmanager
    async def _start(self, was_owned: bool) -> AsyncIterator[tuple[Node, list[APIRouter]]]:
        settings = self._settings.model_copy(update={"resume": self._settings.resume or was_owned})
        async with running_node(self.engine, settings, owned=self._owned) as node:
            yield node, self.private_routers(node)

    async def _owned(self) -> None:
        self.taken_over += 1

    def private_routers(self, node: Node) -> list[APIRouter]:
        return [router(lambda _: node)]


async def main(server: str, port: int) -> None:
    process = ApiProcess(NodeSettings(), server)
    async with process.ownership.running():
        config = uvicorn.Config(process.app, port=port, log_level="warning")
        await uvicorn.Server(config).serve()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))


def settings_in(folder: Path, **more: object) -> NodeSettings:
    return NodeSettings(enabled=True, outbox=folder / "outbox.sqlite", **more)  # type: ignore[arg-type]
