"""The leader's part of verification, with real queues in SQLite and no worker."""

import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleet.sql.support import MARK, a_job, attempts_of
from fleet.verification.support import control_of
from proofserve.fleet import verification as controlling
from proofserve.fleet.job_queues import JobSender
from proofserve.fleet.sql.locks import process_lock
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification_records import DAY_S, JobFinding, JobPhase, VerdictOutcome

pytestmark = pytest.mark.anyio

ABSTAINED = JobFinding(VerdictOutcome.ABSTAINED, 0.1, reason="no checkpoint")


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(tmp_path / "fleet.sqlite")


@pytest.fixture
async def store(database: str) -> AsyncIterator[FleetStore]:
    async with await FleetStore.open(database) as opened:
        yield opened


@pytest.fixture
def sender(database: str, store: FleetStore) -> Iterator[JobSender]:
    with closing(JobSender(database)) as made:
        yield made


def taken(database: str, job_id: str, worker: str) -> None:
    """What a worker that is killed in mid-job leaves in the queues."""
    with closing(sqlite3.connect(f"{database}.jobs")) as file, file:
        changed = file.execute(
            "UPDATE workflow_status SET status = 'PENDING', executor_id = ?"
            " WHERE workflow_uuid = ? AND status = 'ENQUEUED'",
            (worker, job_id),
        )
        assert changed.rowcount == 1


async def test_a_job_that_no_worker_takes_waits(
    store: FleetStore, sender: JobSender, database: str
) -> None:
    job, _ = await a_job(store)
    control = control_of(store, database)
    for _ in range(3):
        await control.step(sender)
    assert await store.verdicts.open_jobs() == [job]
    progress = sender.progress([job.id])[job.id]
    assert (progress.worker, progress.error) == (None, None)
    view = await store.verdicts.view()
    assert view.jobs[JobPhase.QUEUED] == 1
    assert view.oldest_asked_at == job.asked_at


async def test_a_job_whose_workers_all_die_is_given_up_without_a_verdict_of_fraud(
    store: FleetStore, sender: JobSender, database: str
) -> None:
    job, _ = await a_job(store, replace(MARK, attempts=2))
    control = control_of(store, database)
    await control.step(sender)
    for worker in ("worker-a", "worker-b"):
        taken(database, job.id, worker)
        await store.verdicts.begin(job.id, worker)
        await control.step(sender)
    assert await store.verdicts.open_jobs() == []
    found = await store.verdicts.find(job.id)
    assert found is not None
    assert found[0].outcome is VerdictOutcome.ABSTAINED
    assert found[0].reason == "the job failed: 2 workers ended while they computed it"
    assert sender.progress([job.id])[job.id].error is not None
    view = await store.verdicts.view()
    assert view.jobs[JobPhase.FAILED] == 1


async def test_a_worker_whose_lock_is_free_for_a_moment_keeps_its_job(
    store: FleetStore, sender: JobSender, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = await a_job(store)
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr(controlling, "time", clock)
    control = control_of(store, database, gone_s=3.0)
    await control.step(sender)
    taken(database, job.id, "worker-a")
    await store.verdicts.begin(job.id, "worker-a")
    lock = process_lock(database, "worker-a")

    async def worker_after(pause_s: float) -> str | None:
        nonlocal now
        await control.step(sender)
        now += pause_s
        await control.step(sender)
        return sender.progress([job.id])[job.id].worker

    assert await worker_after(2.0) == "worker-a"
    await lock.take()
    assert await worker_after(4.0) == "worker-a"
    await lock.give_back()
    assert await worker_after(2.0) == "worker-a"
    assert await worker_after(4.0) is None


async def test_old_verdicts_are_deleted_and_the_newest_of_a_member_stays(
    store: FleetStore, sender: JobSender, database: str
) -> None:
    pattern, _ = await a_job(store)
    # Those of the last day count against the alpha of the next ones.
    first = replace(pattern, id="first", asked_at=pattern.asked_at - DAY_S)
    newest = replace(first, id="newest")
    await store.verdicts.add([first, newest])
    control = control_of(store, database, keep_s=1e-6)
    await control.step(sender)
    for job in (pattern, first, newest):
        await store.verdicts.finish(job, ABSTAINED)
        sender.cancel(job)
    await control.step(sender)
    left = await store.verdicts.page(None, 0, 10)
    assert [each.id for each in left] == [newest.id, pattern.id]
    assert await attempts_of(store, first.id) is None
    assert set(sender.progress([first.id, newest.id])) == {newest.id}
    assert (await store.verdicts.view()).outcomes == {VerdictOutcome.ABSTAINED: 3}
