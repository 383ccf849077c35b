"""Jobs of /generate as rows. Every function runs inside a transaction of the caller."""

from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, select, update

from proofserve.fleet.sql.callbacks import deliveries
from proofserve.fleet.sql.requests.job_json import job_text, outcome_text, read_job, read_outcome
from proofserve.fleet.sql.tables import desired, requests
from proofserve.fleet.sql.texts import kept, kept_if
from proofserve.outbox.callbacks import callback_text
from proofserve.rounds.errors import QueueFull
from proofserve.rounds.limits import JobLimits
from proofserve.rounds.records import CompletedJob, Job, JobState, JobView, Outcome
from proofserve.wire.callbacks import callback

_OPEN = requests.c.ended_at.is_(None)


@dataclass(frozen=True, slots=True)
class BegunJob:
    """A job that is computed now, for the time number ``attempt``.

    ``text`` is read outside the transaction: a row that cannot be read has its attempts, too.
    """

    request_id: str
    text: str
    attempt: int

    @property
    def job(self) -> Job:
        return read_job(self.text)


def add(connection: Connection, request_id: str, job: Job, limit: int) -> None:
    """Queue a job. Raises QueueFull if more than ``limit`` nonces would wait."""
    # One after another, and not during a stop: the limit is that of all controllers together.
    connection.execute(select(desired.c.id).with_for_update())
    queued = queued_nonces(connection)
    if queued + len(job.nonces) > limit:
        raise QueueFull(f"Queue full: {queued} nonces queued, limit is {limit}")
    row = {"id": request_id, "nonces": len(job.nonces), "job": job_text(job)}
    connection.execute(requests.insert().values(**row, state=JobState.QUEUED.value))


def queued_nonces(connection: Connection) -> int:
    """The nonces of all jobs that wait or run."""
    chosen = select(func.coalesce(func.sum(requests.c.nonces), 0)).where(_OPEN)
    return int(connection.execute(chosen).scalar_one())


def view(connection: Connection, request_id: str, ended_after: float) -> JobView | None:
    """None for an unknown job, and for one that ended before ``ended_after``."""
    row = connection.execute(select(requests).where(requests.c.id == kept(request_id))).first()
    if row is None or (row.ended_at is not None and row.ended_at <= ended_after):
        return None
    completed = None
    if row.outcome is not None:
        completed = CompletedJob(row.id, read_job(row.job), read_outcome(row.outcome))
    return JobView(row.id, JobState(row.state), completed, row.error)


def begin(connection: Connection) -> BegunJob | None:
    """The oldest job that waits, or that another controller computed when it ended."""
    oldest = select(requests.c.number).where(_OPEN).order_by(requests.c.number).limit(1)
    # A stop may end it at the same moment.
    begun = update(requests).where(requests.c.number == oldest.scalar_subquery(), _OPEN)
    running = {"state": JobState.RUNNING.value, "attempts": requests.c.attempts + 1}
    row = connection.execute(begun.values(**running).returning(requests)).first()
    return None if row is None else BegunJob(row.id, row.job, row.attempts)


def wait_again(connection: Connection, request_id: str) -> None:
    """Note that a job which runs has to wait."""
    open_one = update(requests).where(requests.c.id == request_id, _OPEN)
    connection.execute(open_one.values(state=JobState.QUEUED.value))


def is_open(connection: Connection, request_id: str) -> bool:
    chosen = select(requests.c.number).where(requests.c.id == request_id, _OPEN)
    return connection.execute(chosen).first() is not None


def finish(connection: Connection, about: CompletedJob, now: float) -> bool:
    """Store the outcome, and queue the callback; False if the job has ended before."""
    ended = _end(connection, about.request_id, JobState.COMPLETED, now, about.outcome)
    if ended and about.job.url is not None:
        endpoint, body = callback(about)
        text = callback_text(endpoint, body)
        deliveries.add_body(connection, endpoint, about.job.url, text, now)
    return ended


def fail(connection: Connection, request_id: str, error: str, now: float) -> bool:
    """Note why the job failed; False if it has ended before."""
    return _end(connection, request_id, JobState.FAILED, now, error=error)


def cancel_all(connection: Connection, now: float) -> None:
    """End every job that waits or runs."""
    ended = update(requests).where(_OPEN)
    connection.execute(ended.values(state=JobState.CANCELLED.value, ended_at=now))


def expire(connection: Connection, ended_before: float, limits: JobLimits) -> None:
    """Delete the jobs that ended before ``ended_before``, and the oldest above the limits."""
    connection.execute(delete(requests).where(requests.c.ended_at <= ended_before))
    ended = select(requests.c.number, requests.c.nonces).where(~_OPEN)
    nonces = 0
    for count, row in enumerate(connection.execute(ended.order_by(requests.c.number.desc()))):
        nonces += row.nonces
        # The newest stays: no client has read it yet.
        if count and (count >= limits.max_kept_jobs or nonces > limits.max_kept_nonces):
            connection.execute(delete(requests).where(~_OPEN, requests.c.number <= row.number))
            return


def _end(
    connection: Connection,
    request_id: str,
    state: JobState,
    now: float,
    outcome: Outcome | None = None,
    error: str | None = None,
) -> bool:
    found = None if outcome is None else outcome_text(outcome)
    values = {"state": state.value, "ended_at": now, "outcome": found, "error": kept_if(error)}
    open_one = update(requests).where(requests.c.id == request_id, _OPEN)
    return bool(connection.execute(open_one.values(values)).rowcount)
