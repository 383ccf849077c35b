"""Durable queues of job ids, by DBOS: the only module that knows it (ADR 38).

DBOS keeps its tables apart from ours: in the schema ``proofserve_jobs`` of a PostgreSQL database,
or in ``<file>.jobs`` beside an SQLite file. It has one instance per process, so a process has one
``JobRunner`` at a time.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dbos import DBOS, DBOSClient
from dbos import error as dbos_errors
from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError

from proofserve.fleet.records import StoreUnavailable
from proofserve.fleet.sql.database import database_url, is_sqlite, use_log, why
from proofserve.fleet.verification_records import VerificationJob

# The name of the job function, of the application and of its version: rows in DBOS's tables.
_VERIFY, _APPLICATION, _VERSION = "verify", "proofserve", "1"
_SCHEMA = "proofserve_jobs"
_CONNECTIONS = 4
_LOCK_S = 30
# States of DBOS in which nothing will happen any more.
_ENDED = {"ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED", "SUCCESS"}


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Where a job is: with ``worker``, None while it waits. One that has ended has an ``error``."""

    worker: str | None
    error: str | None


class JobSender:
    """Puts jobs into queues, and looks after them; its methods block.

    ``url`` is that of the fleet's database. Raises ValueError for another kind of URL, and the
    errors of SQLAlchemy.
    """

    def __init__(self, url: str) -> None:
        _quieten()
        DBOS.migrate(_address(url), schema=_SCHEMA)
        self._engine = _engine(url)
        self._client = DBOSClient(
            system_database_engine=self._engine,
            dbos_system_schema=_SCHEMA,
            application_name=_APPLICATION,
            # The next pass of the controller tries again.
            retry_connection_errors=False,
        )

    def send(self, job: VerificationJob) -> None:
        """Put a job into its queue. A job that was sent before stays as it is."""
        self._client.enqueue(
            {
                "workflow_name": _VERIFY,
                "queue_name": job.queue,
                "workflow_id": job.id,
                "workflow_timeout": job.rule.timeout_s,
                "priority": job.rule.priority,
                "app_version": _VERSION,
            },
            job.id,
        )

    def progress(self, job_ids: Sequence[str]) -> Mapping[str, JobProgress]:
        """Where jobs are; a job that was never sent is left out."""
        found = self._client.list_workflows(
            workflow_ids=list(job_ids), load_input=False, load_output=True
        )
        return {
            each.workflow_id: JobProgress(
                worker=each.executor_id if each.status == "PENDING" else None,
                error=_reason(each.error) or each.status if each.status in _ENDED else None,
            )
            for each in found
        }

    def send_again(self, job: VerificationJob) -> None:
        """Give a job, whose worker is gone, to another one."""
        self._client.resume_workflow(job.id, queue_name=job.queue)

    def cancel(self, job: VerificationJob) -> None:
        self._client.cancel_workflow(job.id)

    def forget(self, job_ids: Sequence[str]) -> None:
        """Delete what the queues know of jobs that have ended."""
        self._client.delete_workflows(list(job_ids))

    def close(self) -> None:
        self._client.destroy()
        self._engine.dispose()


class JobRunner:
    """Runs ``verify`` with the ids of jobs, of each queue one at a time, until closed.

    ``queues`` says how often each queue is asked, in seconds. ``worker`` names this process. It
    tries a job up to ``most_tries`` times while the job's error ``is_passing``.
    """

    def __init__(
        self,
        url: str,
        worker: str,
        queues: Mapping[str, float],
        verify: Callable[[str], None],
        most_tries: int,
        is_passing: Callable[[BaseException], bool],
    ) -> None:
        _quieten()
        self._queues = dict(queues)
        self._engine = _engine(url)
        config: Any = {
            "name": _APPLICATION,
            "system_database_url": _address(url),
            "system_database_engine": self._engine,
            "dbos_system_schema": _SCHEMA,
            "application_version": _VERSION,
            "executor_id": worker,
            "max_executor_threads": 1 + len(queues),
            "enable_otlp": False,
            "log_level": "WARNING",
        }
        DBOS(config=config)

        @DBOS.step(
            name=_VERIFY,
            retries_allowed=most_tries > 1,
            max_attempts=most_tries,
            should_retry=is_passing,
        )
        def step(job_id: str) -> None:
            verify(job_id)

        @DBOS.workflow(name=_VERIFY)
        def run(job_id: str) -> None:
            step(job_id)

    def start(self) -> None:
        """Begin to take jobs. Raises StoreUnavailable."""
        DBOS.listen_queues(list(self._queues))
        try:
            DBOS.launch()
            for name, poll_s in self._queues.items():
                DBOS.register_queue(
                    name,
                    worker_concurrency=1,
                    polling_interval_sec=poll_s,
                    on_conflict="always_update",
                )
        except SQLAlchemyError as error:
            text = f"the queues in the fleet's database cannot be had: {why(error)}"
            raise StoreUnavailable(text) from error

    def close(self, seconds: int) -> None:
        """Take no more jobs, and wait at most ``seconds`` for the one that runs."""
        DBOS.destroy(destroy_registry=True, workflow_completion_timeout_sec=seconds)
        self._engine.dispose()


def _reason(error: Exception | None) -> str:
    """The error of the last try, where DBOS's own text says only how many there were."""
    if isinstance(error, dbos_errors.DBOSMaxStepRetriesExceeded) and error.errors:
        error = error.errors[-1]
    return "" if error is None else str(error)


def _quieten() -> None:
    # DBOS would print to stderr by a handler of its own, if it had none, in another form than ours.
    logger = logging.getLogger("dbos")
    logger.handlers = [logging.NullHandler()]
    logger.propagate = True
    logger.setLevel(logging.WARNING)


def _url(url: str) -> URL:
    parsed = database_url(url)
    if not is_sqlite(parsed):
        return parsed
    return parsed.set(database=f"{parsed.database}.jobs")


def _address(url: str) -> str:
    return _url(url).render_as_string(hide_password=False)


def _engine(url: str) -> Engine:
    """Connections as DBOS makes them; on SQLite with a log, so that a commit is one write."""
    parsed = _url(url)
    pool: Any = {"pool_size": _CONNECTIONS, "max_overflow": 2, "hide_parameters": True}
    if not is_sqlite(parsed):
        # A power failure may lose the last commits: the controller sends those jobs again.
        connecting = {"options": "-c synchronous_commit=off"}
        return create_engine(parsed, **pool, pool_pre_ping=True, connect_args=connecting)
    engine = create_engine(parsed, **pool)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: object) -> None:
        connection.isolation_level = "IMMEDIATE"
        connection.execute(f"PRAGMA busy_timeout = {_LOCK_S * 1000}")
        connection.execute("PRAGMA foreign_keys = ON")
        use_log(connection, _LOCK_S)
        # As above.
        connection.execute("PRAGMA synchronous = NORMAL")

    return engine
