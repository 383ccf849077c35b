"""The leader's part of verification: samples that are due, and jobs that got stuck."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from sqlalchemy.exc import SQLAlchemyError

from proofserve.fleet.errors import NothingToVerify, StoreUnavailable
from proofserve.fleet.sql.verdicts.store import VerdictStore
from proofserve.fleet.verification.durable import JobProgress, JobSender
from proofserve.fleet.verification.policy import SampledLane, VerificationPolicy, due, job_of
from proofserve.fleet.verification_records import (
    JobCause,
    JobFinding,
    JobPhase,
    VerdictOutcome,
    VerificationJob,
)
from proofserve.fleet.watch import FleetWatch

_logger = logging.getLogger(__name__)

PASS_EVERY_S = 1.0
# So long after the end of a round that was replaced its lanes are still sampled, seconds.
_LATE_S = 600.0
# The lock that a worker holds while it lives; DBOS knows the worker by the same name.
WORKER_LOCK = "worker-"
# A restart of PostgreSQL frees all locks, and each worker takes its own again within two seconds.
_GONE_S = 3.0


class VerificationControl:
    """Makes jobs by the policy, sends them, and gives those of dead workers to others.

    Run one at a time, by the leader. The rows are the truth: whatever is interrupted, the next pass
    repairs. ``open_sender`` connects to the queues; it is called in a thread. Verdicts are deleted
    after ``keep_s`` seconds, 0 for never; the newest one of each member stays. A worker whose lock
    is free for ``gone_s`` seconds has ended.
    """

    def __init__(
        self,
        store: VerdictStore,
        watch: FleetWatch,
        policy: VerificationPolicy,
        open_sender: Callable[[], JobSender],
        keep_s: float = 0.0,
        gone_s: float = _GONE_S,
    ) -> None:
        self._store = store
        self._watch = watch
        self._policy = policy
        self._open_sender = open_sender
        self._keep_s = keep_s
        self._gone_s = gone_s
        # When a pass first found a worker's lock free, by the monotonic clock.
        self._free_since: dict[str, float] = {}
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Begin the next pass now."""
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        sender: JobSender | None = None
        try:
            while True:
                self._wake.clear()
                try:
                    if sender is None:
                        sender = await self._begin()
                    await self.step(sender)
                except (StoreUnavailable, SQLAlchemyError) as error:
                    _logger.warning("members are not verified: %s", error)
                except Exception:
                    _logger.exception("a pass over verification jobs failed")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), PASS_EVERY_S)
        finally:
            if sender is not None:
                await asyncio.to_thread(sender.close)

    async def _begin(self) -> JobSender:
        for content in self._policy.calibrations.values():
            await self._store.keep_calibration(content)
        return await asyncio.to_thread(self._open_sender)

    async def ask(self, member_id: str) -> VerificationJob:
        """Have all that a member has stored of the newest round sampled now.

        Raises NothingToVerify, and StoreUnavailable.
        """
        overview = self._watch.current
        condition = next((e for e in overview.members if e.member.id == member_id), None)
        rule = self._policy.rule_of(condition) if condition else None
        if rule is None:
            raise NothingToVerify("the policy has no rule for this member: add one to its file")
        round_, lane = overview.desired.round, overview.newest.get(member_id)
        if round_ is None or lane is None or not lane.stored or round_.spec.target is not None:
            raise NothingToVerify(
                "the member has no stored vectors of the fleet's newest round: start a round"
            )
        newest = await self._store.newest_batches(round_.number)
        sampled = SampledLane(round_, lane, rule)
        job = job_of(overview, sampled, JobCause.OPERATOR, newest[lane.lane.lane])
        (stored,) = await self._store.add([job])
        self.wake()
        return stored

    async def step(self, sender: JobSender) -> None:
        """One pass. Raises StoreUnavailable and the errors of SQLAlchemy."""
        open_jobs = await self._store.open_jobs()
        made = await self._due(open_jobs)
        if made:
            await self._store.add(made)
        progress = await asyncio.to_thread(sender.progress, [job.id for job in open_jobs])
        for job in [*open_jobs, *made]:
            if job.id not in progress:
                await asyncio.to_thread(sender.send, job)
            elif progress[job.id].ended:
                await self._give_up(job, progress[job.id].error)
        await self._replace_dead_workers(sender, open_jobs, progress)
        if self._keep_s and (old := await self._store.old(self._keep_s)):
            await asyncio.to_thread(sender.forget, old)
            await self._store.delete(old)

    async def _due(self, open_jobs: Sequence[VerificationJob]) -> list[VerificationJob]:
        overview = self._watch.current
        desired = overview.desired.round
        ended = await self._store.ended_lanes(desired.number, _LATE_S) if desired else []
        busy = {(job.round_number, job.lane) for job in open_jobs}
        found = list(due(overview, self._policy, ended, busy))
        numbers = {each.round.number for each in found}
        newest = {number: await self._store.newest_batches(number) for number in numbers}
        return [
            job_of(overview, each, JobCause.POLICY, newest[each.round.number].get(each.lane, 0))
            for each in found
        ]

    async def _replace_dead_workers(
        self,
        sender: JobSender,
        open_jobs: Sequence[VerificationJob],
        progress: Mapping[str, JobProgress],
    ) -> None:
        ended = await self._ended_workers(progress)
        for job in open_jobs:
            worker = progress[job.id].worker if job.id in progress else None
            if worker not in ended:
                continue
            if job.attempts >= job.rule.attempts:
                await asyncio.to_thread(sender.cancel, job)
                await self._give_up(job, f"{job.attempts} workers ended while they computed it")
                continue
            _logger.warning("worker %s is gone: job %s goes to another one", worker, job.id)
            await self._store.wait_again(job.id)
            await asyncio.to_thread(sender.send_again, job)

    async def _ended_workers(self, progress: Mapping[str, JobProgress]) -> set[str]:
        at_work = {each.worker for each in progress.values() if each.worker}
        free = await self._store.free_locks(at_work) if at_work else set()
        now = time.monotonic()
        self._free_since = {worker: self._free_since.get(worker, now) for worker in free}
        return {each for each, since in self._free_since.items() if now - since >= self._gone_s}

    async def _give_up(self, job: VerificationJob, error: str) -> None:
        """A job that cannot be computed is an abstention; no change if it has its verdict."""
        seconds = max(0.0, time.time() - job.asked_at)
        found = JobFinding(VerdictOutcome.ABSTAINED, seconds, reason=f"the job failed: {error}")
        if await self._store.finish(job, found, JobPhase.FAILED) is not None:
            _logger.warning("job %s failed: %s", job.id, error)
