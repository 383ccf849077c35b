"""Computes one job chunk by chunk, in the time that no round takes."""

import asyncio
from collections import deque
from collections.abc import Callable

from proofserve.rounds.batches import artifacts_of, failures_of
from proofserve.rounds.calls import ask
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.ports import ProofEngine, ProofSession
from proofserve.rounds.records import Deferred, Job, Outcome, ProofBatch, Proofs
from proofserve.rounds.validation import validate


class Computation:
    """Runs jobs on ``engine`` while ``no_round`` is set.

    ``chunk_timeout_s`` bounds how long chat may hold back one chunk; ``clock`` gives monotonic
    seconds.
    """

    def __init__(
        self,
        engine: ProofEngine,
        no_round: asyncio.Event,
        chunk_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._no_round = no_round
        self._chunk_timeout_s = chunk_timeout_s
        self._clock = clock

    async def run(self, job: Job, started: Callable[[], None]) -> Outcome:
        """The outcome of ``job``; ``started`` is called when the engine is first asked.

        A round that starts in between is waited for before the next chunk, without a lease.

        Raises:
            EngineFault: a chunk failed, or chat held it back for too long.
            EngineGone: there is no engine any more.
            ProtocolError: the claims cannot be judged.
        """
        chunks = deque(
            job.nonces[i : i + job.batch_size] for i in range(0, len(job.nonces), job.batch_size)
        )
        done: list[ProofBatch] = []
        while chunks:
            await self._no_round.wait()
            started()
            async with self._engine.session(job.work) as session:
                while chunks and self._no_round.is_set():
                    done.append(await self._chunk(session, job, chunks[0]))
                    chunks.popleft()
        # Thousands of vectors are encoded or compared here: off the loop that also serves chat.
        return await asyncio.to_thread(_outcome, job, done)

    async def _chunk(self, session: ProofSession, job: Job, nonces: tuple[int, ...]) -> ProofBatch:
        deadline = self._clock() + self._chunk_timeout_s
        while True:
            answer = await ask(session, nonces, job.work.scheme.width)
            if not isinstance(answer, Deferred):
                return answer
            if self._clock() >= deadline:
                raise EngineFault(
                    f"skipped: chat held a chunk back for more than {self._chunk_timeout_s:g} s"
                    f" ({answer.reason})"
                )


def _outcome(job: Job, done: list[ProofBatch]) -> Outcome:
    if job.validation is not None:
        claims, test = job.validation.claims, job.validation.test
        return validate(job.work, job.nonces, claims, done, test)
    return Proofs(
        artifacts=tuple(artifact for batch in done for artifact in artifacts_of(batch)),
        failed={n: reason for batch in done for n, reason in failures_of(batch).items()},
    )
