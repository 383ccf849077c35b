"""What the forked processes run: proofserve, with a fake engine for members and workers."""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from endurance.fleet.toy import TOY_QUEUE, CheatEngine, ToyTruths
from proofserve.api.routes import router
from proofserve.cli.main import app
from proofserve.settings.fleet import FleetWorkerSettings
from proofserve.settings.node import NodeSettings
from proofserve.verifier.nodes.members import check_sample
from proofserve.wiring.fleet_worker import run_worker
from proofserve.wiring.node import running_node
from support.fake_engine import TOY_ENGINE_INFO, FakeEngine

MODEL = TOY_ENGINE_INFO.model_names[0]


def controller(port: int, *options: str) -> None:
    """``proofserve fleet serve``."""
    app(["fleet", "serve", "--port", str(port), *options])


def receiver(port: int, database: Path) -> None:
    """``proofserve receive``."""
    app(["receive", "--quiet", "--port", str(port), "--database", str(database)])


def member(port: int, call_s: float, settings: Mapping[str, Any], cheats: bool) -> None:
    """A node whose engine answers each call after ``call_s`` seconds."""
    _log_to_stderr()
    engine = CheatEngine() if cheats else FakeEngine()
    engine.latency_s = call_s
    asyncio.run(_serve(port, engine, NodeSettings(**settings)))


def worker(database: str, name: str, call_s: float) -> None:
    """``proofserve fleet worker``, which recomputes by the fake engine and not by a checkpoint."""
    _log_to_stderr()
    settings = FleetWorkerSettings(database=database, worker_name=name, forward_batch=4)
    check = partial(check_sample, truth=ToyTruths(call_s, settings.forward_batch))
    asyncio.run(run_worker(settings, [TOY_QUEUE], check))


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


async def _serve(port: int, engine: FakeEngine, settings: NodeSettings) -> None:
    async with running_node(engine, settings) as node:
        served = FastAPI()
        served.include_router(router(lambda _: node))

        @served.get("/health")
        async def health() -> dict[str, str]:
            return {"status": "ok"}

        config = uvicorn.Config(served, port=port, ws="none", lifespan="off", access_log=False)
        await uvicorn.Server(config).serve()
