"""The vectors of the fake engine: what an honest member sends, and what a cheat sends."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from proofserve.fleet.verification import queue_name
from proofserve.fleet.verification_records import VerificationTask
from proofserve.rounds.records import Deferred, ProofBatch, Workload
from proofserve.verifier.judges import Vectors
from proofserve.verifier.judging import JudgingOptions
from proofserve.verifier.verification import Truth
from support.fake_engine import TOY_FACTS, FakeEngine

TOY_QUEUE = queue_name(TOY_FACTS.weights_digest, None)


class CheatEngine(FakeEngine):  # type: ignore[misc]  # Any to mypy
    """Proves with the inputs of another key, so that every vector is wrong."""

    async def answer(
        self, work: Workload, nonces: Sequence[int], core: int = 0
    ) -> ProofBatch | Deferred:
        other = replace(work, public_key="another key")
        found: ProofBatch | Deferred = await super().answer(other, nonces, core)
        return found


class ToyTruths:
    """Computes a worker's vectors by the fake engine, as ``CheckpointTruths`` by checkpoints.

    Each call takes ``call_s`` seconds and is for up to ``at_once`` nonces.
    """

    def __init__(self, call_s: float, at_once: int) -> None:
        self._call_s = call_s
        self._at_once = at_once

    def __call__(self, task: VerificationTask, _options: JudgingOptions) -> Truth:
        work = task.round.spec.work
        vectors = lambda nonces: toy_vectors(work, nonces, self._call_s)  # noqa: E731
        return Truth(vectors, work.scheme.width, self._at_once, TOY_FACTS.weights_digest)


def toy_vectors(work: Workload, nonces: Sequence[int], call_s: float = 0.0) -> Vectors:
    """The vectors of an honest member, after ``call_s`` seconds."""
    engine = FakeEngine()
    engine.latency_s = call_s
    batch = asyncio.run(engine.answer(work, nonces))
    assert isinstance(batch, ProofBatch), "this engine defers nothing"  # noqa: S101
    return dict(zip(batch.nonces, batch.values, strict=True))
