"""Jobs of /generate as rows: any controller takes them and shows them, the leader computes them."""

import asyncio
import logging
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, replace

from proofserve.fleet.engine import FleetEngine
from proofserve.fleet.records import NoMemberReady, StoreUnavailable
from proofserve.fleet.sql.requests import RequestStore, read_job
from proofserve.fleet.watch import FleetWatch
from proofserve.rounds.computation import Computation
from proofserve.rounds.errors import Refusal, Refused
from proofserve.rounds.jobs import WaitQueue
from proofserve.rounds.records import CompletedJob, Job, JobView, Limits, Outcome
from proofserve.rounds.status import QueueGauges
from proofserve.rounds.tasks import reason_of, woken

_logger = logging.getLogger(__name__)

# How often the leader looks for jobs of other controllers, and whether one was cancelled. Seconds.
_LOOK_EVERY_S = 1.0
# So often a job is begun, by all leaders: it may be what makes members or controllers end.
_MOST_ATTEMPTS = 5


@dataclass(eq=False, repr=False)
class FleetJobs:
    """Queues jobs in the database; ``compute_for_ever`` computes them, one at a time.

    A call that waits for its result is computed by the controller that was asked, in its turn. The
    admission of ``computation`` counts the nonces of such calls, and of judgements.
    """

    _store: RequestStore
    _watch: FleetWatch
    _engine: FleetEngine
    _computation: Computation
    _limits: Limits
    _turns: WaitQueue = field(default_factory=WaitQueue, init=False)
    _news: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @property
    def gauges(self) -> QueueGauges:
        """The nonces of all stored jobs, and of this controller's calls that wait."""
        waiting = self._computation.admission.gauges
        return replace(
            waiting, queued_nonces=waiting.queued_nonces + self._watch.current.view.queued_nonces
        )

    async def submit(self, job: Job) -> str:
        """Queue ``job`` and return its id. Raises Refused (QUEUE_FULL) and StoreUnavailable."""
        request_id = str(uuid.uuid4())
        waiting = self._computation.admission.gauges
        await self._store.add(request_id, job, waiting.limit - waiting.queued_nonces)
        self._news.set()
        return request_id

    async def run(self, job: Job) -> Outcome:
        """As the port: compute ``job`` while the caller waits."""
        with self._computation.admission.admitted(len(job.nonces)):
            async with self._turns.turn():
                return await self._compute(job)

    async def result(self, request_id: str) -> JobView:
        """Raises StoreUnavailable, and Refused once the result has expired."""
        view = await self._store.view(request_id, self._limits.result_ttl_s)
        if view is None:
            raise Refused(Refusal.UNKNOWN_JOB, f"Request {request_id} not found")
        return view

    async def cancel(self) -> None:
        """End all stored jobs. Raises StoreUnavailable."""
        await self._store.cancel_all()
        self._news.set()

    async def compute_for_ever(self) -> None:
        """Compute stored jobs until cancelled; the next leader begins again with an open one."""
        while True:
            found = False
            try:
                await self._store.expire(self._limits)
                found = await self._compute_oldest()
            except StoreUnavailable as error:
                _logger.warning("stored jobs wait: %s", error)
            except Exception:
                _logger.exception("a stored job could not be computed")
            if not found:
                await woken(self._news, _LOOK_EVERY_S)
                self._news.clear()

    async def _compute_oldest(self) -> bool:
        """Compute the oldest open job; False if there is none that can be computed now."""
        if not self._computation.no_round.is_set() or not self._watch.current.ready:
            return False
        async with self._turns.turn():
            begun = await self._store.begin()
            if begun is None:
                return False
            request_id, job_text, attempt = begun
            if attempt > _MOST_ATTEMPTS:
                text = f"{_MOST_ATTEMPTS} attempts ended without a result"
                await self._store.fail(request_id, text)
                return True
            job = await asyncio.to_thread(read_job, job_text)
            computing = asyncio.create_task(self._compute(job))
            try:
                if await self._cancelled(request_id, computing):
                    return True
            finally:
                computing.cancel()
                await asyncio.gather(computing, return_exceptions=True)
        if isinstance(computing.exception(), NoMemberReady) and attempt < _MOST_ATTEMPTS:
            await self._store.wait_again(request_id)
            return False
        await self._settle(request_id, job, computing)
        return True

    async def _compute(self, job: Job) -> Outcome:
        """Calls are large enough for all members; results do not depend on it."""
        wide = replace(job, batch_size=max(job.batch_size, self._engine.nonces_of_call))
        return await self._computation.run(wide, started=lambda: None)

    async def _cancelled(self, request_id: str, computing: "asyncio.Task[Outcome]") -> bool:
        """Wait for the end of ``computing``, or of its job by a stop in any controller."""
        while True:
            await asyncio.wait({computing}, timeout=_LOOK_EVERY_S)
            if computing.done():
                return False
            # Without the database the work goes on: nothing says that it was cancelled.
            with suppress(StoreUnavailable):
                if not await self._store.is_open(request_id):
                    return True

    async def _settle(self, request_id: str, job: Job, done: "asyncio.Task[Outcome]") -> None:
        error = reason_of(done)
        while True:
            try:
                if error is not None:
                    await self._store.fail(request_id, error)
                else:
                    await self._store.finish(CompletedJob(request_id, job, done.result()))
            except StoreUnavailable as unavailable:
                _logger.warning("job %s is stored later: %s", request_id, unavailable)
                await asyncio.sleep(self._limits.callback_retry_s)
            else:
                break
        how = "completed" if error is None else f"failed: {error}"
        known = {"request_id": request_id}
        _logger.info("job %s of %d nonces: %s", request_id, len(job.nonces), how, extra=known)
