"""Jobs in real worker processes; one of them is killed in mid-verification."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from fleet.servers import until
from fleet.verification.support import RULE, a_job, a_worker, control_of
from proofserve.fleet.records import Wish
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification.records import (
    JobFinding,
    JobPhase,
    VerdictOutcome,
    VerificationRule,
)

pytestmark = pytest.mark.anyio


@pytest.mark.slow  # each worker process imports torch: some 15 s of processor time
async def test_a_killed_workers_job_goes_to_another_and_gets_one_verdict(
    tmp_path: Path, tiny: Path
) -> None:
    database = str(tmp_path / "fleet.sqlite")
    async with await FleetStore.open(database) as store:
        honest = await a_job(store, tiny, "honest", RULE)
        few = await a_job(store, tiny, "few", VerificationRule(nonces=100, dist_threshold=0.03))
        fraud = await a_job(store, tiny, "fraud", RULE, four_bits=True)
        verdicts = store.verdicts
        sending = asyncio.create_task(control_of(store, database).run())
        with ExitStack() as running:
            first = running.enter_context(a_worker(tmp_path, database, tiny, "first"))

            async def at_work() -> bool:
                return any(j.state is JobPhase.RUNNING for j in await verdicts.open_jobs())

            while not await at_work():
                assert first.poll() is None, (tmp_path / "first.log").read_text()
            first.kill()
            lost = await verdicts.open_jobs()
            running.enter_context(a_worker(tmp_path, database, tiny, "second"))

            async def all_ended() -> bool:
                return not await verdicts.open_jobs()

            await until(all_ended, 120)
        sending.cancel()
        found = {each.id: each for each in await verdicts.page(None, 0, 10)}
        wishes = {each.name: each.wish for each in await store.members()}
        tried = await verdicts.find_job(lost[0].id)
        again = await verdicts.finish(honest, JobFinding(VerdictOutcome.FRAUD, 1.0, report={}))
    assert tried is not None
    assert tried.attempts == 2
    assert again is None
    assert {id_: each.outcome for id_, each in found.items()} == {
        honest.id: VerdictOutcome.HONEST,
        fraud.id: VerdictOutcome.FRAUD,
        few.id: VerdictOutcome.ABSTAINED,
    }
    assert "too few nonces: the lane has 24 of 100" in (found[few.id].reason or "")
    assert wishes == {"honest": Wish.ACTIVE, "fraud": Wish.CORDONED, "few": Wish.ACTIVE}
