"""Computes one job chunk by chunk, in the time that no round takes."""

import asyncio
from collections import deque
from collections.abc import Callable

from proofserve.rounds.batches import artifacts_of, failures_of
from proofserve.rounds.calls import Patience, chunks
from proofserve.rounds.ports import ProofEngine
from proofserve.rounds.records import Job, Outcome, ProofBatch, Proofs, Validation, Verdict
from proofserve.rounds.totals import NodeTotals, Work
from proofserve.rounds.validation import validate


class Computation:
    """Runs jobs on ``engine`` while ``no_round`` is set, and counts them in ``tally``."""

    def __init__(
        self, engine: ProofEngine, no_round: asyncio.Event, patience: Patience, tally: NodeTotals
    ) -> None:
        self._engine = engine
        self._no_round = no_round
        self._patience = patience
        self._tally = tally

    async def run(self, job: Job, started: Callable[[], None]) -> Outcome:
        """The outcome of ``job``; ``started`` is called when the engine is first asked.

        A round that starts in between is waited for before the next chunk, without a lease.

        Raises:
            EngineFault: a chunk failed, or chat held it back for too long.
            EngineGone: there is no engine any more.
            ProtocolError: the claims cannot be judged.
        """
        if job.validation is not None:
            return await self._tally.judged(self._judge(job, job.validation, started))
        done = await self._prove(job, started)
        # Thousands of vectors are encoded or compared here: off the loop that also serves chat.
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
            await self._no_round.wait()
            started()
            async with self._engine.session(job.work) as session:
                while todo and self._no_round.is_set():
                    width = job.work.scheme.width
                    batch = await self._patience.insist(session, todo[0], width)
                    self._tally.computed(work, len(batch.nonces), len(batch.failed))
                    done.append(batch)
                    todo.popleft()
        return done


def _proofs(done: list[ProofBatch]) -> Proofs:
    return Proofs(
        artifacts=tuple(artifact for batch in done for artifact in artifacts_of(batch)),
        failed={n: reason for batch in done for n, reason in failures_of(batch).items()},
    )
