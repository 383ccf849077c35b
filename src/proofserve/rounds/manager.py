"""The rounds and jobs of one node: at most one round runs, and one job at a time."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace

from proofserve.protocol.sketch import cost_of_few_values
from proofserve.rounds.computation import Computation, NonceLimit, self_check, winners_among
from proofserve.rounds.errors import EngineFault, EngineGone, OutboxUnavailable, Refusal, Refused
from proofserve.rounds.generation import Generation, lane_of
from proofserve.rounds.ports import NodeManager, Outbox, ProofEngine
from proofserve.rounds.records import (
    CompletedJob,
    DistanceClaims,
    DistanceVerdict,
    Job,
    JobState,
    JobView,
    Limits,
    Outcome,
    RoundSpec,
)
from proofserve.rounds.state import Move, State, step
from proofserve.rounds.status import Counters, EngineGauges, NodeTotals, Status
from proofserve.rounds.tasks import end, reason_of

_logger = logging.getLogger(__name__)


class JobQueue:
    """Runs submitted jobs one at a time; keeps results until they expire, or are too many."""

    def __init__(self, computation: Computation, outbox: Outbox, limits: Limits) -> None:
        self._computation = computation
        self._outbox = outbox
        self._limits = limits
        # A job waits for its turn; the lock is given on in the order in which it was asked for.
        self._turn = asyncio.Lock()
        self._entries: dict[str, _QueuedJob] = {}
        # The entries whose job has ended, oldest first, and the sum of their nonces.
        self._ended: dict[str, _QueuedJob] = {}
        self._ended_nonces = 0

    def submit(self, job: Job) -> str:
        """Queue ``job`` and return its id. Raises Refused if too many nonces wait."""
        self._computation.admission.admit(len(job.nonces))
        request_id = str(uuid.uuid4())
        entry = self._entries[request_id] = _QueuedJob(job, JobView(request_id, JobState.QUEUED))
        entry.task = asyncio.create_task(self._carry_out(entry))
        # Not a finally in the task: a task that is cancelled before its first step runs no finally.
        entry.task.add_done_callback(lambda task: self._settle(entry, task))
        return request_id

    async def run(self, job: Job) -> Outcome:
        """Compute ``job`` in its turn while the caller waits; its result is not kept.

        ``cancel`` does not end this job; cancelling the caller does. Raises Refused
        (QUEUE_FULL) and as ``Computation.run``.
        """
        with self._computation.admission.admitted(len(job.nonces)):
            async with self._turn:
                return await self._computation.run(job, started=lambda: None)

    def result(self, request_id: str) -> JobView:
        entry = self._entries.get(request_id)
        if entry is None:
            raise Refused(Refusal.UNKNOWN_JOB, f"Request {request_id} not found")
        return entry.view

    async def cancel(self, grace_s: float) -> None:
        active = [entry for entry in self._entries.values() if not entry.task.done()]
        for entry in active:
            entry.cancel_ordered = True
            # After a cancelled store the result would be unknown: only if the store fails.
            if not entry.storing:
                entry.task.cancel()
        await end(*(entry.task for entry in active), grace_s=grace_s)

    async def aclose(self, grace_s: float) -> None:
        await self.cancel(grace_s)
        for request_id in list(self._ended):
            self._forget(request_id)

    async def _carry_out(self, entry: "_QueuedJob") -> CompletedJob:
        async with self._turn:
            outcome = await self._computation.run(entry.job, entry.start)
        # The next job may use the engine while the outbox stores this one's callback.
        completed = CompletedJob(entry.view.request_id, entry.job, outcome)
        while entry.job.url is not None:
            entry.storing = True
            try:
                await self._outbox.push(entry.job.url, completed)
            except OutboxUnavailable:
                entry.storing = False
            else:
                break
            if entry.cancel_ordered:
                raise asyncio.CancelledError
            await asyncio.sleep(self._limits.callback_retry_s)
        return completed

    def _settle(self, entry: "_QueuedJob", task: "asyncio.Task[CompletedJob]") -> None:
        count, limits = len(entry.job.nonces), self._limits
        self._computation.admission.leave(count)
        if task.cancelled():
            view = replace(entry.view, state=JobState.CANCELLED)
        elif error := reason_of(task):
            view = replace(entry.view, state=JobState.FAILED, error=error)
        else:
            view = replace(entry.view, state=JobState.COMPLETED, completed=task.result())
        entry.view = view
        loop = asyncio.get_running_loop()
        entry.expiry = loop.call_later(limits.result_ttl_s, self._forget, view.request_id)
        self._ended[view.request_id] = entry
        self._ended_nonces += count
        # The newest stays: no client has read it yet.
        while len(self._ended) > 1 and (
            len(self._ended) > limits.max_kept_jobs or self._ended_nonces > limits.max_kept_nonces
        ):
            self._forget(next(iter(self._ended)))
        how = view.state.value if view.error is None else f"{view.state.value}: {view.error}"
        known = {"request_id": view.request_id}
        _logger.info("job %s of %d nonces: %s", view.request_id, count, how, extra=known)

    def _forget(self, request_id: str) -> None:
        entry = self._ended.pop(request_id)
        del self._entries[request_id]
        self._ended_nonces -= len(entry.job.nonces)
        entry.expiry.cancel()


@dataclass(slots=True, eq=False)
class _QueuedJob:
    job: Job
    view: JobView
    storing: bool = False
    cancel_ordered: bool = False
    task: "asyncio.Task[CompletedJob]" = field(init=False)
    expiry: asyncio.TimerHandle = field(init=False)

    def start(self) -> None:
        self.view = replace(self.view, state=JobState.RUNNING)


@dataclass(slots=True)
class _Round:
    spec: RoundSpec
    counters: Counters
    generation: Generation | None = None
    task: "asyncio.Task[None] | None" = None


class RoundManager(NodeManager):
    def __init__(self, engine: ProofEngine, outbox: Outbox, limits: Limits) -> None:
        self._engine = engine
        self._outbox = outbox
        self._limits = limits
        self._clock = time.monotonic
        self.totals = NodeTotals()
        self._state = State.IDLE
        self._round: _Round | None = None
        self._no_round = asyncio.Event()
        self._no_round.set()
        self._changing = asyncio.Lock()
        admission = NonceLimit(limits.max_queued_nonces)
        self._computation = Computation(
            engine, self._no_round, admission, limits.chunk_timeout_s, self.totals, self._clock
        )
        self._jobs = JobQueue(self._computation, outbox, limits)
        self._checking = asyncio.Lock()
        # The newest gauges, when they came, and the question that the engine has not answered.
        self._gauges: EngineGauges | None = None
        self._gauges_at = 0.0
        self._asked: asyncio.Task[EngineGauges] | None = None

    async def configure(self, spec: RoundSpec, move: Move) -> None:
        async with self._changing:
            state = self._step(move)
            if (warning := cost_of_few_values(spec.work.scheme)) is not None:
                _logger.warning("round %s: %s", spec.round_id, warning)
            await self._fit(spec)
            configured = _Round(spec, Counters(self._clock, self.totals))
            if state is State.GENERATING:
                await self._begin(configured)
            else:
                self._state, self._round = state, configured

    async def generate(self) -> None:
        async with self._changing:
            target = self._step(Move.GENERATE)
            if self._round is not None and target is not self._state:
                await self._begin(self._round)

    async def validate(self) -> None:
        async with self._changing:
            target = self._step(Move.VALIDATE)
            await self._end_generation(close=True)
            if self._round is not None:
                self._round.counters.begin()
            self._state = target

    async def judge(self, claims: DistanceClaims, of_round: bool = True) -> DistanceVerdict:
        self._step(Move.JUDGE)
        configured = self._round
        if configured is None or configured.spec.target is None:
            raise AssertionError("state.step allows judging only with a distance round")
        spec, target = configured.spec, configured.spec.target
        url = spec.url if self._state is State.VALIDATING else None
        verdict = await self._computation.judge(spec, target, claims)
        if not of_round:
            return verdict
        if url is not None:
            await self._outbox.push(url, verdict)
        configured.counters.judged(len(claims.nonces), winners_among(verdict))
        return verdict

    async def stop(self) -> None:
        async with self._changing:
            await self._stop(close=True)

    def status(self) -> Status:
        configured = self._round
        generation = configured.generation if configured else None
        running = self._state is State.GENERATING
        return Status(
            state=self._state,
            spec=configured.spec if configured else None,
            stats=configured.counters.read() if configured else None,
            paused_reason=generation.paused_reason if generation and running else None,
            error=generation.error if generation else None,
            queue=self._computation.admission.gauges,
            cores=generation.cores if generation and running else (),
        )

    async def submit(self, job: Job) -> str:
        self.require_open()
        return self._jobs.submit(job)

    async def run(self, job: Job) -> Outcome:
        self.require_open()
        return await self._jobs.run(job)

    async def result(self, request_id: str) -> JobView:
        return self._jobs.result(request_id)

    async def engine_gauges(self) -> EngineGauges:
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._engine.gauges())
            self._asked.add_done_callback(self._answered)
        asked, limits = self._asked, self._limits
        seconds = limits.engine_answer_s if self._gauges is None else limits.engine_busy_s
        await asyncio.wait({asked}, timeout=seconds)
        if asked.done() and not asked.cancelled():
            return asked.result()
        if self._gauges is None:
            raise EngineFault(f"the engine did not answer within {seconds:g} s")
        return replace(self._gauges, age_s=self._clock() - self._gauges_at)

    def _answered(self, asked: "asyncio.Task[EngineGauges]") -> None:
        if not asked.cancelled() and asked.exception() is None:
            self._gauges, self._gauges_at = asked.result(), self._clock()

    async def self_check(self) -> float:
        self.require_open()
        async with self._checking:
            began = self._clock()
            await self_check(self._engine)
            return self._clock() - began

    async def aclose(self) -> None:
        self.is_closing = True
        async with self._changing:
            await self._stop(close=False)
        await self._jobs.aclose(self._limits.flush_timeout_s)
        if self._asked is not None:
            self._asked.cancel()

    def _step(self, move: Move) -> State:
        if move is not Move.STOP:
            self.require_open()
        return step(self._state, move, self._round.spec if self._round is not None else None)

    async def _fit(self, spec: RoundSpec) -> None:
        """Have the engine choose the size of forwards, and log it. The round reports any fault."""
        try:
            async with asyncio.timeout(self._limits.engine_answer_s):
                await self._engine.fit(spec.work)
            chosen = await self.engine_gauges()
        except (EngineFault, EngineGone, TimeoutError):
            return
        if chosen.forward_nonces:
            text = "round %s: a forward has %d nonces; chat waits for %.0f ms of its %.0f ms"
            figures = (chosen.forward_nonces, chosen.part_s * 1e3, chosen.forward_s * 1e3)
            _logger.info(text, spec.round_id, *figures, extra={"round_id": spec.round_id})
        if chosen.warning is not None:
            _logger.warning("round %s: %s", spec.round_id, chosen.warning)

    async def _begin(self, chosen: _Round) -> None:
        lane_of(chosen.spec)
        opened = await self._outbox.open_round(chosen.spec)
        if chosen.generation is None:
            # First start in this process: the stored results are from an earlier process.
            processed = opened.next_index - opened.failed
            chosen.counters.carry(processed, opened.found, opened.failed)
        chosen.counters.begin()
        chosen.generation = Generation(self._engine, self._outbox, self._limits, chosen.counters)
        self._round = chosen
        self._no_round.clear()
        self._state = State.GENERATING
        running = chosen.generation.run(chosen.spec, opened)
        chosen.task = asyncio.create_task(self._generate(running, chosen))
        round_id = chosen.spec.round_id
        _logger.info("round %s generates", round_id, extra={"round_id": round_id})

    async def _generate(self, running: Awaitable[None], chosen: _Round) -> None:
        try:
            await running
        finally:
            chosen.counters.end()
            id_, processed = chosen.spec.round_id, chosen.counters.read().total_processed
            level, why = logging.INFO, "stopped"
            if chosen.generation is not None and chosen.generation.error is not None:
                level, why = logging.ERROR, chosen.generation.error
            text = "round %s ended after %d nonces: %s"
            _logger.log(level, text, id_, processed, why, extra={"round_id": id_})
            if self._gauges is not None:
                text = "round %s: since the server's start chat waited %.0f ms for proofs at most"
                waited_ms = self._gauges.longest_chat_wait_s * 1e3
                _logger.info(text, id_, waited_ms, extra={"round_id": id_})
            self._state = step(self._state, Move.STOP)
            self._no_round.set()

    async def _stop(self, close: bool) -> None:
        # Jobs first: they would start when the round ends.
        await self._jobs.cancel(self._limits.flush_timeout_s)
        await self._end_generation(close)
        if self._round is not None:
            self._round.counters.end()
        self._state = self._step(Move.STOP)

    async def _end_generation(self, close: bool) -> None:
        """End the running round, if any; ``close`` also closes a round that a fault ended."""
        last = self._round
        if last is None or last.generation is None or last.task is None:
            return
        last.generation.stop()
        await asyncio.wait({last.task})
        if close:
            await last.generation.close(last.spec)
