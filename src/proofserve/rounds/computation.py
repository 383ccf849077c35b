"""Computes one job chunk by chunk while no round runs, and judges its claims."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.errors import IncompleteRecomputation
from proofserve.protocol.verdict.comparison import Claim, compare
from proofserve.protocol.verdict.counting import judge
from proofserve.rounds.calls import NOT_FINITE, ChunkDeadline, artifacts_of, chunks, failures_of
from proofserve.rounds.counters import NodeTotals, Work
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.ports import ProofEngine
from proofserve.rounds.records import (
    Job,
    Outcome,
    ProofBatch,
    Proofs,
    StatTest,
    Validation,
    Verdict,
    Workload,
)

# By nonce: float32 [width] each.
Vectors = Mapping[int, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Computation:
    """Runs jobs on ``engine`` while ``no_round`` is set, and counts them in ``totals``."""

    engine: ProofEngine
    no_round: asyncio.Event
    deadline: ChunkDeadline
    totals: NodeTotals

    async def run(self, job: Job, started: Callable[[], None]) -> Outcome:
        """The outcome of ``job``; ``started`` is called before the first engine call.

        If a round starts meanwhile, the job gives its lease back and waits for the round's end.

        Raises EngineFault (a chunk failed, or chat deferred it past the deadline), EngineGone and
        ProtocolError (the claims cannot be judged).
        """
        if job.validation is not None:
            return await self.totals.judged(self._judge(job, job.validation, started))
        done = await self._prove(job, started)
        # In a thread: encoding thousands of vectors would block the event loop that serves chat.
        return await asyncio.to_thread(_proofs, done)

    async def _judge(
        self, job: Job, validation: Validation, started: Callable[[], None]
    ) -> Verdict:
        done = await self._prove(job, started)
        claims, test = validation.claims, validation.test
        return await asyncio.to_thread(validate, job.work, job.nonces, claims, done, test)

    async def _prove(self, job: Job, started: Callable[[], None]) -> list[ProofBatch]:
        todo = deque(chunks(job.nonces, job.batch_size))
        done: list[ProofBatch] = []
        work: Work = "job" if job.validation is None else "validation"
        while todo:
            await self.no_round.wait()
            started()
            async with self.engine.session(job.work) as session:
                while todo and self.no_round.is_set():
                    width = job.work.scheme.width
                    batch = await self.deadline.retry_until_deadline(session, todo[0], width)
                    self.totals.computed(work, len(batch.nonces), len(batch.failed))
                    done.append(batch)
                    todo.popleft()
        return done


def _proofs(done: list[ProofBatch]) -> Proofs:
    return Proofs(
        artifacts=tuple(artifact for batch in done for artifact in artifacts_of(batch)),
        failed={n: reason for batch in done for n, reason in failures_of(batch).items()},
    )


def validate(
    work: Workload,
    nonces: Sequence[int],
    claims: Sequence[Claim],
    recomputed: Sequence[ProofBatch],
    test: StatTest,
) -> Verdict:
    """Judge ``claims`` about ``nonces`` by the batches in ``recomputed``.

    Raises EngineFault (the recomputation is incomplete, so no verdict is possible) and
    ProtocolError as ``comparison.compare``.
    """
    for batch in recomputed:
        for nonce in batch.failed:
            raise EngineFault(f"no verdict is possible: nonce {nonce}: {NOT_FINITE}")
    ours = {
        nonce: row
        for batch in recomputed
        for nonce, row in zip(batch.nonces, batch.values, strict=True)
    }
    try:
        return _by_count(nonces, ours, claims, test, work.scheme.width)
    except IncompleteRecomputation as error:
        raise EngineFault(f"no verdict is possible: {error}") from error


def _by_count(
    nonces: Sequence[int], ours: Vectors, claims: Sequence[Claim], test: StatTest, width: int
) -> Verdict:
    found = compare(nonces, ours, claims, test.dist_threshold, width)
    verdict = judge(found.n_mismatch, found.n_total, test.p_mismatch, test.fraud_threshold)
    nonces = found.mismatch_nonces
    return Verdict(found.n_total, found.n_mismatch, nonces, verdict.p_value, verdict.fraud_detected)
