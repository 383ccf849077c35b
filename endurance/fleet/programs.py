"""What the forked processes run: the commands of proofserve, and a member over the fake engine."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from proofserve.api.routes import router
from proofserve.cli.main import app
from proofserve.engines.fake import TOY_ENGINE_INFO, FakeEngine
from proofserve.settings.node import NodeSettings
from proofserve.wiring.node import running_node

MODEL = TOY_ENGINE_INFO.model_names[0]


def controller(port: int, *options: str) -> None:
    """``proofserve fleet serve``."""
    app(["fleet", "serve", "--port", str(port), *options])


def receiver(port: int, database: Path) -> None:
    """``proofserve receive``."""
    app(["receive", "--quiet", "--port", str(port), "--database", str(database)])


def member(port: int, call_s: float, settings: Mapping[str, Any]) -> None:
    """A node whose engine answers each call after ``call_s`` seconds."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(_serve(port, call_s, NodeSettings(**settings)))


async def _serve(port: int, call_s: float, settings: NodeSettings) -> None:
    engine = FakeEngine()
    engine.latency_s = call_s
    async with running_node(engine, settings) as node:
        served = FastAPI()
        served.include_router(router(lambda _: node))

        @served.get("/health")
        async def health() -> dict[str, str]:
            return {"status": "ok"}

        config = uvicorn.Config(served, port=port, ws="none", lifespan="off", access_log=False)
        await uvicorn.Server(config).serve()
