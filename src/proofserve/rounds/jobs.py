"""The queue of ``/generate``: one job at a time, in the order in which they came."""

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from proofserve.rounds.computation import Computation
from proofserve.rounds.errors import OutboxUnavailable, Refusal, Refused
from proofserve.rounds.ports import Outbox
from proofserve.rounds.records import CompletedJob, Job, JobState, JobView, Limits, Outcome
from proofserve.rounds.tasks import end, reason_of

_logger = logging.getLogger(__name__)


class JobQueue:
    """Runs submitted jobs one at a time; keeps results until they expire, or are too many."""

    def __init__(self, computation: Computation, outbox: Outbox, limits: Limits) -> None:
        self._computation = computation
        self._outbox = outbox
        self._limits = limits
        self._places_in_order = WaitQueue()
        self._entries: dict[str, _QueuedJob] = {}
        # The entries whose job has ended, oldest first, and the sum of their nonces.
        self._ended: dict[str, _QueuedJob] = {}
        self._ended_nonces = 0

    def submit(self, job: Job) -> str:
        """Queue ``job`` and return its id. Raises Refused if too many nonces wait."""
        self._computation.admission.admit(len(job.nonces))
        entry = _QueuedJob(str(uuid.uuid4()), job, self._places_in_order.join())
        self._entries[entry.request_id] = entry
        entry.task = asyncio.create_task(self._carry_out(entry))
        # Not a finally in the task: a task that is cancelled before its first step runs no finally.
        entry.task.add_done_callback(lambda task: self._settle(entry, task))
        return entry.request_id

    async def run(self, job: Job) -> Outcome:
        """Compute ``job`` in its turn while the caller waits; its result is not kept.

        ``cancel`` does not end this job; cancelling the caller does. Raises Refused
        (QUEUE_FULL) and as ``Computation.run``.
        """
        with self._computation.admission.admitted(len(job.nonces)):
            async with self._places_in_order.turn():
                return await self._computation.run(job, started=lambda: None)

    def result(self, request_id: str) -> JobView:
        entry = self._entries.get(request_id)
        if entry is None:
            raise Refused(Refusal.UNKNOWN_JOB, f"Request {request_id} not found")
        return entry.view

    async def cancel(self, grace_s: float) -> None:
        active = [entry for entry in self._entries.values() if not entry.task.done()]
        for entry in active:
            entry.cancel()
        await end(*(entry.task for entry in active), grace_s=grace_s)

    async def aclose(self, grace_s: float) -> None:
        await self.cancel(grace_s)
        for request_id in list(self._ended):
            self._forget(request_id)

    async def _carry_out(self, entry: "_QueuedJob") -> CompletedJob:
        await entry.place.wait()
        outcome = await self._computation.run(entry.job, entry.start)
        # The next job may use the engine while the outbox stores this one's callback.
        self._places_in_order.leave(entry.place)
        completed = CompletedJob(entry.request_id, entry.job, outcome)
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
        self._places_in_order.leave(entry.place)
        self._computation.admission.leave(len(entry.job.nonces))
        loop, limits = asyncio.get_running_loop(), self._limits
        entry.expiry = loop.call_later(limits.result_ttl_s, self._forget, entry.request_id)
        entry.settle(task)
        self._ended[entry.request_id] = entry
        count = len(entry.job.nonces)
        self._ended_nonces += count
        # The newest stays: no client has read it yet.
        while len(self._ended) > 1 and (
            len(self._ended) > limits.max_kept_jobs or self._ended_nonces > limits.max_kept_nonces
        ):
            self._forget(next(iter(self._ended)))
        view = entry.view
        known = {"request_id": view.request_id}
        how = view.state.value if view.error is None else f"{view.state.value}: {view.error}"
        _logger.info("job %s of %d nonces: %s", *(view.request_id, count, how), extra=known)

    def _forget(self, request_id: str) -> None:
        entry = self._ended.pop(request_id)
        del self._entries[request_id]
        self._ended_nonces -= len(entry.job.nonces)
        entry.expiry.cancel()


class _QueuedJob:
    task: "asyncio.Task[CompletedJob]"
    expiry: asyncio.TimerHandle

    def __init__(self, request_id: str, job: Job, place: asyncio.Event) -> None:
        self.request_id = request_id
        self.job = job
        self.place = place
        self.view = JobView(request_id, JobState.QUEUED)
        self.storing = False
        self.cancel_ordered = False

    def start(self) -> None:
        self.view = replace(self.view, state=JobState.RUNNING)

    def cancel(self) -> None:
        """Cancel the job; while its callback is being stored, only if that fails.

        After a cancelled store the result would be unknown.
        """
        self.cancel_ordered = True
        if not self.storing:
            self.task.cancel()

    def settle(self, task: "asyncio.Task[CompletedJob]") -> None:
        if task.cancelled():
            self.view = replace(self.view, state=JobState.CANCELLED)
        elif error := reason_of(task):
            self.view = replace(self.view, state=JobState.FAILED, error=error)
        else:
            self.view = replace(self.view, state=JobState.COMPLETED, completed=task.result())


class WaitQueue:
    """A first-in, first-out queue. ``join`` takes a place at once, not when a task next runs."""

    def __init__(self) -> None:
        self._places: deque[asyncio.Event] = deque()

    def join(self) -> asyncio.Event:
        """Take the last place; its event is set when it becomes the first."""
        place = asyncio.Event()
        self._places.append(place)
        self._call_first()
        return place

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Take the last place and wait for the turn; the end of the context leaves it."""
        place = self.join()
        try:
            await place.wait()
            yield
        finally:
            self.leave(place)

    def leave(self, place: asyncio.Event) -> None:
        """Give a place up, at any position. A second call does nothing."""
        if place in self._places:
            self._places.remove(place)
            self._call_first()

    def _call_first(self) -> None:
        if self._places:
            self._places[0].set()
