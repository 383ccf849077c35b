"""Jobs of /generate as rows, so that every controller knows them and none is lost with one."""

import json

from pydantic import TypeAdapter
from sqlalchemy import Connection, delete, func, select, update

from proofserve.fleet.sql.callbacks import DeliveryStore
from proofserve.fleet.sql.database import FleetDatabase
from proofserve.fleet.sql.tables import desired, read_work, record_text, requests
from proofserve.outbox.database import StorePart, announces, kept, reads, writes
from proofserve.outbox.planning import callback_text
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.errors import Refusal, Refused
from proofserve.rounds.records import (
    CompletedJob,
    Job,
    JobState,
    JobView,
    Limits,
    Outcome,
    StatTest,
)
from proofserve.wire.callbacks import callback

_OPEN = requests.c.ended_at.is_(None)
_OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)


class RequestStore(StorePart[FleetDatabase]):
    """Part of ``FleetStore``."""

    @writes
    def add(self, connection: Connection, request_id: str, job: Job, limit: int) -> None:
        """Queue a job. Raises Refused if more than ``limit`` nonces would wait in all."""
        # One after another, and not during a stop: the limit is that of all controllers together.
        connection.execute(select(desired.c.id).with_for_update())
        queued = queued_nonces(connection)
        if queued + len(job.nonces) > limit:
            raise Refused(
                Refusal.QUEUE_FULL, f"Queue full: {queued} nonces queued, limit is {limit}"
            )
        row = {"id": request_id, "nonces": len(job.nonces), "job": record_text(job)}
        connection.execute(requests.insert().values(**row, state=JobState.QUEUED.value))

    @reads
    def view(self, connection: Connection, request_id: str, keep_s: float) -> JobView | None:
        """None for an unknown job, and for one that ended ``keep_s`` seconds ago or earlier."""
        row = connection.execute(select(requests).where(requests.c.id == kept(request_id))).first()
        if row is None or (row.ended_at is not None and row.ended_at <= self.clock() - keep_s):
            return None
        completed = None
        if row.outcome is not None:
            outcome = _OUTCOME.validate_python(json.loads(row.outcome))
            completed = CompletedJob(row.id, read_job(row.job), outcome)
        return JobView(row.id, JobState(row.state), completed, row.error)

    @writes
    def begin(self, connection: Connection) -> tuple[str, str, int] | None:
        """The id and text of the oldest job that was not ended, and the number of this attempt.

        From now on it runs. It waits, or another controller computed it when that ended. Its text
        is for ``read_job``, outside the transaction: one that cannot be read has its attempts, too.
        """
        oldest = select(requests.c.number).where(_OPEN).order_by(requests.c.number).limit(1)
        # A stop may end it at the same moment.
        begun = update(requests).where(requests.c.number == oldest.scalar_subquery(), _OPEN)
        running = {"state": JobState.RUNNING.value, "attempts": requests.c.attempts + 1}
        row = connection.execute(begun.values(**running).returning(requests)).first()
        return None if row is None else (row.id, row.job, row.attempts)

    @writes
    def wait_again(self, connection: Connection, request_id: str) -> None:
        """Note that a job which runs has to wait; no change if it has ended."""
        open_one = update(requests).where(requests.c.id == request_id, _OPEN)
        connection.execute(open_one.values(state=JobState.QUEUED.value))

    @reads
    def is_open(self, connection: Connection, request_id: str) -> bool:
        """Whether the job still waits or runs."""
        chosen = select(requests.c.number).where(requests.c.id == request_id, _OPEN)
        return connection.execute(chosen).first() is not None

    @announces
    def finish(self, connection: Connection, about: CompletedJob) -> bool:
        """Store an outcome and queue its callback; False if the job has ended before."""
        # ASCII only, as ``record_text``.
        outcome = json.dumps(_OUTCOME.dump_python(about.outcome, mode="json"))
        ended = self._end(connection, about.request_id, JobState.COMPLETED, outcome=outcome)
        if ended and about.job.url is not None:
            endpoint, body = callback(about)
            text = callback_text(endpoint, body)
            DeliveryStore.add(connection, endpoint, about.job.url, self.clock(), text)
        return ended

    @writes
    def fail(self, connection: Connection, request_id: str, error: str) -> bool:
        """Note why a job failed; False if it has ended before."""
        return self._end(connection, request_id, JobState.FAILED, error=kept(error))

    @writes
    def cancel_all(self, connection: Connection) -> None:
        """End every job that waits or runs."""
        ended = update(requests).where(_OPEN)
        connection.execute(ended.values(state=JobState.CANCELLED.value, ended_at=self.clock()))

    @writes
    def expire(self, connection: Connection, limits: Limits) -> None:
        """Delete what ended long ago, and the oldest of too many."""
        before = self.clock() - limits.result_ttl_s
        connection.execute(delete(requests).where(requests.c.ended_at <= before))
        ended = select(requests.c.number, requests.c.nonces).where(~_OPEN)
        nonces = 0
        for count, row in enumerate(connection.execute(ended.order_by(requests.c.number.desc()))):
            nonces += row.nonces
            # The newest stays: no client has read it yet.
            if count and (count >= limits.max_kept_jobs or nonces > limits.max_kept_nonces):
                connection.execute(delete(requests).where(~_OPEN, requests.c.number <= row.number))
                return

    def _end(
        self, connection: Connection, request_id: str, state: JobState, **found: str | None
    ) -> bool:
        values = {"state": state.value, "ended_at": self.clock(), **found}
        open_one = update(requests).where(requests.c.id == request_id, _OPEN)
        return bool(connection.execute(open_one.values(values)).rowcount)


def queued_nonces(connection: Connection) -> int:
    """The nonces of all jobs that wait or run, in the caller's transaction."""
    chosen = select(func.coalesce(func.sum(requests.c.nonces), 0)).where(_OPEN)
    return int(connection.execute(chosen).scalar_one())


def read_job(text: str) -> Job:
    known = json.loads(text)
    claims = known["claims"]
    known["work"] = read_work(known["work"])
    known["nonces"] = tuple(known["nonces"])
    known["claims"] = None if claims is None else tuple(Claim(**each) for each in claims)
    known["test"] = StatTest(**known["test"])
    return Job(**known)
