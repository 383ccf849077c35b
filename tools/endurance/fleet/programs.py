"""What the forked processes run: proofserve, with a fake engine for members and workers.

Of the fake engine are the vectors of an honest member, and what a cheat sends.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from proofserve.api.routes import router
from proofserve.cli.main import app
from proofserve.fleet.verification import queue_name
from proofserve.fleet.verification_records import VerificationTask
from proofserve.rounds.records import Deferred, ProofBatch, Workload
from proofserve.settings.fleet import FleetWorkerSettings
from proofserve.settings.node import NodeSettings
from proofserve.verifier.judges import Vectors
from proofserve.verifier.judging import JudgingOptions
from proofserve.verifier.nodes.members import check_sample
from proofserve.verifier.verification import Truth
from proofserve.wiring.fleet_worker import run_worker
from proofserve.wiring.node import running_node
from support.fake_engine import TOY_ENGINE_INFO, TOY_FACTS, FakeEngine

TOY_QUEUE = queue_name(TOY_FACTS.weights_digest, None)


MODEL = TOY_ENGINE_INFO.model_names[0]


class CheatEngine(FakeEngine):  # type: ignore[misc]  # Any to mypy
    """Proves with the inputs of another key, so that every vector is wrong."""

    async def answer(
        self, work: Workload, nonces: Sequence[int], core: int = 0
    ) -> ProofBatch | Deferred:
        other = replace(work, public_key="another key")
        made: ProofBatch | Deferred = await super().answer(other, nonces, core)
        return made


def toy_truth(
    task: VerificationTask, _options: JudgingOptions, call_s: float, at_once: int
) -> Truth:
    """A worker's vectors by the fake engine, as ``CheckpointTruths`` has them by checkpoints.

    Each call takes ``call_s`` seconds and is for up to ``at_once`` nonces.
    """
    work = task.round.spec.work
    vectors = partial(toy_vectors, work, call_s=call_s)
    return Truth(vectors, work.scheme.width, at_once, TOY_FACTS.weights_digest)


def toy_vectors(work: Workload, nonces: Sequence[int], call_s: float = 0.0) -> Vectors:
    """The vectors of an honest member, after ``call_s`` seconds."""
    engine = FakeEngine()
    engine.latency_s = call_s
    batch = asyncio.run(engine.answer(work, nonces))
    assert isinstance(batch, ProofBatch), "this engine defers nothing"  # noqa: S101
    return dict(zip(batch.nonces, batch.values, strict=True))


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
    truth = partial(toy_truth, call_s=call_s, at_once=settings.forward_batch)
    check = partial(check_sample, truth=truth)
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
