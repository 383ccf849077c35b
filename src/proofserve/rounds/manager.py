"""The owner of everything that runs: at most one round, and the job queue."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from proofserve.rounds.computation import Computation
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.generation import Generation
from proofserve.rounds.jobs import JobQueue
from proofserve.rounds.limits import Limits
from proofserve.rounds.ports import Outbox, ProofEngine
from proofserve.rounds.records import (
    EngineGauges,
    Job,
    JobView,
    Outcome,
    QueueGauges,
    RoundSpec,
    Stats,
)
from proofserve.rounds.state import Move, State, step


@dataclass(frozen=True, slots=True)
class Status:
    """What a node does. ``spec`` and ``stats`` are the last round's once it has stopped.

    ``paused_reason`` says why a running round does not get on, ``error`` what ended a stopped one.
    """

    state: State
    spec: RoundSpec | None
    stats: Stats | None
    paused_reason: str | None
    error: str | None
    queue: QueueGauges


class RoundManager:
    """Starts, stops and shows the rounds and jobs of one node.

    ``clock`` gives monotonic seconds.
    """

    def __init__(
        self,
        engine: ProofEngine,
        outbox: Outbox,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._outbox = outbox
        self._limits = limits
        self._clock = clock
        self._state = State.IDLE
        self._round: Generation | None = None
        self._round_task: asyncio.Task[None] | None = None
        self._no_round = asyncio.Event()
        self._no_round.set()
        self._changing = asyncio.Lock()
        computation = Computation(engine, self._no_round, limits.jobs.chunk_timeout_s, clock)
        self._jobs = JobQueue(computation, outbox, limits.jobs, clock)

    async def start(self, spec: RoundSpec) -> None:
        """Start the round ``spec``; jobs wait from now on.

        Raises:
            AlreadyGenerating: a round runs.
            OutboxUnavailable: the round could not be written down.
            Nothing has changed in either case.
        """
        async with self._changing:
            started = step(self._state, Move.START)
            await self._outbox.open_round(spec)
            self._round = Generation(
                self._engine, self._outbox, spec, self._limits.rounds, self._clock
            )
            self._no_round.clear()
            self._state = started
            self._round_task = asyncio.create_task(self._generate(self._round))

    async def stop(self) -> None:
        """End the round, if one runs, and cancel the submitted jobs. Always legal.

        What the round has finished is stored before this returns, if the outbox takes it.
        """
        async with self._changing:
            # Jobs first: the end of the round would start them.
            await self._jobs.cancel(self._limits.rounds.flush_timeout_s)
            if self._round is not None and self._round_task is not None:
                self._round.stop()
                await asyncio.wait({self._round_task})
            self._state = step(self._state, Move.STOP)

    def status(self) -> Status:
        """What happens now."""
        running = self._state is State.GENERATING
        last = self._round
        return Status(
            state=self._state,
            spec=last.spec if last else None,
            stats=last.stats if last else None,
            paused_reason=last.paused_reason if last and running else None,
            error=last.error if last else None,
            queue=self._jobs.gauges,
        )

    def submit(self, job: Job) -> str:
        """Queue ``job`` and return its id. Raises QueueFull."""
        return self._jobs.submit(job)

    async def run(self, job: Job) -> Outcome:
        """Compute ``job`` in its turn while the caller waits; see ``JobQueue.run``."""
        return await self._jobs.run(job)

    def result(self, request_id: str) -> JobView:
        """A submitted job as it is now. Raises UnknownJob."""
        return self._jobs.result(request_id)

    async def engine_gauges(self) -> EngineGauges:
        """The engine's counters.

        Raises:
            EngineGone: there is no engine any more.
            EngineFault: it did not answer in time.
        """
        seconds = self._limits.engine_answer_s
        try:
            async with asyncio.timeout(seconds):
                return await self._engine.gauges()
        except TimeoutError:
            raise EngineFault(f"the engine did not answer within {seconds:g} s") from None

    async def aclose(self) -> None:
        """Stop, and end every task that this object owns."""
        await self.stop()
        await self._jobs.aclose(self._limits.rounds.flush_timeout_s)

    async def _generate(self, generation: Generation) -> None:
        """A round, and the state that goes with it: whatever ends the one ends the other."""
        try:
            await generation.run()
        finally:
            self._state = step(self._state, Move.STOP)
            self._no_round.set()
