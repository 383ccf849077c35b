"""Jobs in real worker processes; one of them is killed in mid-verification."""

import asyncio
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fleet.sql.support import attempts_of, members_of
from fleet.verification.support import RULE, a_job, a_worker, control_of
from proofserve.fleet.records import Wish
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification_records import (
    JobFinding,
    JobPhase,
    VerdictOutcome,
    VerificationRule,
)
from support.pace import until

pytestmark = pytest.mark.anyio


@pytest.mark.slow  # each worker process imports torch: some 15 s of processor time
async def test_a_killed_workers_job_goes_to_another_and_gets_one_verdict(
    tmp_path: Path, tiny: Path, url: str
) -> None:
    async with await FleetStore.open(url) as store:
        honest = await a_job(store, tiny, "honest", RULE)
        few = await a_job(store, tiny, "few", VerificationRule(nonces=100, dist_threshold=0.03))
        fraud = await a_job(store, tiny, "fraud", RULE, four_bits=True)
        verdicts = store.verdicts
        sending = asyncio.create_task(control_of(store, url).run())
        with ExitStack() as running:
            first = running.enter_context(a_worker(tmp_path, url, tiny, "first"))

            await until(partial(is_at_work, store, 1, first), 120)
            first.kill()
            lost = await verdicts.open_jobs()
            running.enter_context(a_worker(tmp_path, url, tiny, "second"))

            async def all_ended() -> bool:
                return not await verdicts.open_jobs()

            await until(all_ended, 120)
        sending.cancel()
        found = {each.id: each for each in await verdicts.page(None, 0, 10)}
        wishes = {each.name: each.wish for each in await members_of(store)}
        tried = await attempts_of(store, lost[0].id)
        again = await verdicts.finish(honest, JobFinding(VerdictOutcome.FRAUD, 1.0, report={}))
    assert tried == 2
    assert again is None
    assert {id_: each.outcome for id_, each in found.items()} == {
        honest.id: VerdictOutcome.HONEST,
        fraud.id: VerdictOutcome.FRAUD,
        few.id: VerdictOutcome.ABSTAINED,
    }
    assert "too few nonces: the lane has 24 of 100" in (found[few.id].reason or "")
    assert wishes == {"honest": Wish.ACTIVE, "fraud": Wish.CORDONED, "few": Wish.ACTIVE}


@pytest.mark.slow
async def test_a_job_that_outlives_its_workers_is_given_up(
    tmp_path: Path, tiny: Path, url: str
) -> None:
    async with await FleetStore.open(url) as store:
        job = await a_job(store, tiny, "honest", replace(RULE, attempts=2))
        sending = asyncio.create_task(control_of(store, url).run())
        for attempt in (1, 2):
            with a_worker(tmp_path, url, tiny, f"worker{attempt}") as worker:
                await until(partial(is_at_work, store, attempt, worker), 120)
                worker.kill()

        async def given_up() -> bool:
            return await store.verdicts.find(job.id) is not None

        await until(given_up)
        sending.cancel()
        (found,) = await store.verdicts.page(None, 0, 10)
        (member,) = await members_of(store)
    assert found.outcome is VerdictOutcome.ABSTAINED
    assert found.reason == "the job failed: 2 workers ended while they computed it"
    assert member.wish is Wish.ACTIVE


async def is_at_work(store: FleetStore, attempt: int, worker: subprocess.Popen[bytes]) -> bool:
    assert worker.poll() is None, "the worker has ended: its log says why"
    jobs = await store.verdicts.open_jobs()
    return any(each.state is JobPhase.RUNNING and each.attempts == attempt for each in jobs)
