"""Verification jobs and verdicts behind one class."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sqlalchemy import Connection

from proofserve.fleet.records import FleetRound, LaneProgress
from proofserve.fleet.sql import lanes, locks, members, rounds
from proofserve.fleet.sql.database import FleetDatabase
from proofserve.fleet.sql.verdicts import jobs, samples, verdicts
from proofserve.fleet.verification_records import (
    JobFinding,
    JobPhase,
    MemberVerdict,
    VerificationJob,
    VerificationTask,
    VerificationView,
)


class VerdictStore:
    """Part of ``FleetStore``. Every method raises StoreUnavailable if the database fails.

    ``announce`` is called after a verdict, because a callback may be due.
    """

    def __init__(
        self, database: FleetDatabase, clock: Callable[[], float], announce: Callable[[], None]
    ) -> None:
        self._database = database
        self._clock = clock
        self._announce = announce

    async def keep_calibration(self, content: str) -> str:
        """Store a calibration for the workers; returns its digest."""
        return await self._database.write(jobs.add_calibration, content)

    async def add(self, made: Sequence[VerificationJob]) -> list[VerificationJob]:
        """Store new jobs, and note what the policy has sampled by them.

        Returns them with their shares of alpha: one controller after another spends it.
        """
        return await self._database.write(jobs.add, made)

    async def newest_batches(self, round_number: int) -> dict[int, int]:
        """The number of the newest stored batch by lane."""
        return await self._database.read(jobs.newest_batches, round_number)

    async def ended_lanes(
        self, before_round: int, within_s: float
    ) -> list[tuple[FleetRound, LaneProgress]]:
        """The lanes of rounds before that number, ended ``within_s`` ago, that have new nonces.

        New are those that were stored since the policy last took a sample of the lane.
        """
        since = self._clock() - within_s
        return await self._database.read(jobs.ended_lanes, before_round, since)

    async def open_jobs(self) -> list[VerificationJob]:
        """The jobs that wait or run, oldest first."""
        return await self._database.read(jobs.open_ones)

    async def wait_again(self, job_id: str) -> None:
        """Note that a running job waits for another worker."""
        await self._database.write(jobs.wait_again, job_id)

    async def free_locks(self, locks_of_workers: Iterable[str]) -> set[str]:
        """Those of the locks that no process holds."""
        return await self._database.read(_free, tuple(locks_of_workers))

    async def begin(self, job_id: str, worker: str) -> VerificationTask | None:
        """Note that ``worker`` begins, and read what it needs. None for a job that has ended."""
        job = await self._database.write(jobs.begin, job_id, worker, self._clock())
        return None if job is None else await self._database.read(_task, job)

    async def finish(
        self, job: VerificationJob, found: JobFinding, state: JobPhase = JobPhase.DONE
    ) -> MemberVerdict | None:
        """Store the verdict of a complete job, and what follows from it, in one transaction.

        None if the job has a verdict already: then nothing is changed.
        """
        try:
            return await self._database.write(verdicts.add, job, found, state, self._clock())
        finally:
            self._announce()

    async def page(self, member_id: str | None, offset: int, limit: int) -> list[MemberVerdict]:
        """Verdicts about one member or all, the newest first."""
        return await self._database.read(verdicts.page, member_id, offset, limit)

    async def find(self, job_id: str) -> tuple[MemberVerdict, dict[str, Any] | None] | None:
        """A verdict and its report; None if the job has none, or there is no such job."""
        return await self._database.read(verdicts.find, job_id)

    async def view(self) -> VerificationView:
        """The newest verdict of each member, and counts of jobs and verdicts."""
        return await self._database.read(verdicts.view, self._clock())

    async def old(self, keep_s: float) -> list[str]:
        """Some jobs whose verdict is older than ``keep_s`` and not the newest of its member."""
        now = self._clock()
        return await self._database.read(verdicts.old, now - keep_s, now)

    async def delete(self, job_ids: Sequence[str]) -> None:
        """Delete verdicts and their jobs; counts stay."""
        await self._database.write(verdicts.delete_with_jobs, job_ids)

    async def find_job(self, job_id: str) -> VerificationJob | None:
        return await self._database.read(jobs.find, job_id)


def _free(connection: Connection, names: tuple[str, ...]) -> set[str]:
    return {name for name in names if not locks.is_held(connection, name)}


def _task(connection: Connection, job: VerificationJob) -> VerificationTask:
    round_ = rounds.by_number(connection, job.round_number)
    _, lane = lanes.find(connection, round_.id, job.lane)
    digest = job.rule.calibration
    return VerificationTask(
        job=job,
        member=members.find_any(connection, job.member_id),
        round=round_,
        lane=lane,
        sample=samples.of_job(connection, job),
        calibration=None if digest is None else jobs.calibration(connection, digest),
    )
