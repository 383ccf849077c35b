"""A job queue with its doubles."""

import asyncio
from collections.abc import Callable

from proofserve.rounds.computation import Computation, NonceLimit
from proofserve.rounds.manager import JobQueue
from proofserve.rounds.records import JobState, Limits, Outcome
from proofserve.rounds.status import NodeTotals
from rounds.doubles import QUICK, MemoryOutbox
from support.fake_engine import FakeEngine
from support.pace import until


class JobBench:
    def __init__(self, limits: Limits = QUICK, clock: Callable[[], float] | None = None) -> None:
        self.tasks_before = asyncio.all_tasks()
        self.engine = FakeEngine()
        self.outbox = MemoryOutbox()
        self.no_round = asyncio.Event()
        self.no_round.set()
        # Chunk timeouts follow ``clock``, or real seconds.
        self.admission = NonceLimit(limits.max_queued_nonces)
        computation = Computation(
            self.engine,
            self.no_round,
            self.admission,
            limits.chunk_timeout_s,
            NodeTotals(),
            clock or asyncio.get_running_loop().time,
        )
        self.queue = JobQueue(computation, self.outbox, limits)

    def state(self, request_id: str) -> JobState:
        return self.queue.result(request_id).state

    async def ended(self, request_id: str) -> JobState:
        await until(lambda: self.state(request_id) not in (JobState.QUEUED, JobState.RUNNING))
        return self.state(request_id)

    def error(self, request_id: str) -> str:
        return self.queue.result(request_id).error or ""

    def outcome(self, request_id: str) -> Outcome | None:
        completed = self.queue.result(request_id).completed
        return None if completed is None else completed.outcome

    async def assert_idle(self) -> None:
        assert self.engine.leases == 0
        assert self.admission.gauges.queued_nonces == 0
        await self.queue.aclose(0.5)
        assert asyncio.all_tasks() == self.tasks_before
