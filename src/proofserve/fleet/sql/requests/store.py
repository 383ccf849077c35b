"""Jobs of /generate behind one class."""

from collections.abc import Callable

from proofserve.fleet.sql.database import FleetDatabase
from proofserve.fleet.sql.requests import rows
from proofserve.rounds.limits import JobLimits
from proofserve.rounds.records import CompletedJob, Job, JobView


class RequestStore:
    """Part of ``FleetStore``. Every method raises StoreUnavailable if the database fails.

    ``announce`` is called after a job has ended, because a callback may be due.
    """

    def __init__(
        self, database: FleetDatabase, clock: Callable[[], float], announce: Callable[[], None]
    ) -> None:
        self._database = database
        self._clock = clock
        self._announce = announce

    async def add(self, request_id: str, job: Job, limit: int) -> None:
        """Queue a job. Raises QueueFull if more than ``limit`` nonces would wait in all."""
        await self._database.write(rows.add, request_id, job, limit)

    async def view(self, request_id: str, keep_s: float) -> JobView | None:
        """None for an unknown job, and for one that ended ``keep_s`` seconds ago or earlier."""
        return await self._database.read(rows.view, request_id, self._clock() - keep_s)

    async def begin(self) -> rows.BegunJob | None:
        """The oldest job that was not ended; from now on it runs."""
        return await self._database.write(rows.begin)

    async def wait_again(self, request_id: str) -> None:
        """Note that a job which runs has to wait; no change if it has ended."""
        await self._database.write(rows.wait_again, request_id)

    async def is_open(self, request_id: str) -> bool:
        """Whether the job still waits or runs."""
        return await self._database.read(rows.is_open, request_id)

    async def finish(self, about: CompletedJob) -> bool:
        """Store an outcome and its callback, in one transaction; False if the job has ended."""
        try:
            return await self._database.write(rows.finish, about, self._clock())
        finally:
            self._announce()

    async def fail(self, request_id: str, error: str) -> bool:
        """Note why a job failed; False if it has ended before."""
        return await self._database.write(rows.fail, request_id, error, self._clock())

    async def cancel_all(self) -> None:
        """End every job that waits or runs."""
        await self._database.write(rows.cancel_all, self._clock())

    async def expire(self, limits: JobLimits) -> None:
        """Delete what ended long ago, and the oldest of too many."""
        before = self._clock() - limits.result_ttl_s
        await self._database.write(rows.expire, before, limits)
