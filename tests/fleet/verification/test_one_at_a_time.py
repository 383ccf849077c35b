"""A worker takes jobs of several queues, and computes one at a time."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.sql.support import a_job
from fleet.verification.support import control_of
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification_records import JobFinding, VerdictOutcome, VerificationTask
from proofserve.settings.fleet import FleetWorkerSettings
from proofserve.wiring.fleet_worker import run_worker
from support.pace import until

pytestmark = pytest.mark.anyio

QUEUES = ("weights:one", "weights:two")
CHECK_S = 0.5


async def test_jobs_of_two_queues_are_computed_one_after_the_other(tmp_path: Path) -> None:
    database = str(tmp_path / "fleet.sqlite")
    times: list[tuple[float, float]] = []

    def check(_task: VerificationTask) -> JobFinding:
        began = time.monotonic()
        time.sleep(CHECK_S)
        times.append((began, time.monotonic()))
        return JobFinding(VerdictOutcome.ABSTAINED, CHECK_S, reason="a test")

    async with await FleetStore.open(database) as store:
        first, _ = await a_job(store)
        jobs = [replace(first, id=queue, queue=queue) for queue in QUEUES]
        await store.verdicts.finish(first, JobFinding(VerdictOutcome.ABSTAINED, 0.0, reason="-"))
        await store.verdicts.add(jobs)
        settings = FleetWorkerSettings(database=database, stop_wait_sec=0)
        sending = asyncio.create_task(control_of(store, database).run())
        working = asyncio.create_task(run_worker(settings, QUEUES, check))

        async def all_ended() -> bool:
            return not await store.verdicts.open_jobs()

        await until(all_ended, 120)
        os.kill(os.getpid(), signal.SIGTERM)
        await working
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending
    (_, first_end), (second_begin, _) = sorted(times)
    assert first_end <= second_begin
