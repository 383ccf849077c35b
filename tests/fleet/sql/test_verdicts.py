"""Jobs and verdicts as rows: one verdict for a job, and what follows from a conviction."""

import json
from dataclasses import replace
from typing import Any

import pytest

from proofserve.fleet.records import Wish
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification_records import (
    AfterConviction,
    JobFinding,
    JobPhase,
    MemberVerdict,
    VerdictOutcome,
    VerificationJob,
)
from proofserve.outbox.callbacks import CallbackPolicy

from .support import MARK, a_job, members_of, vectors_of

pytestmark = pytest.mark.anyio

FRAUD = JobFinding(
    VerdictOutcome.FRAUD,
    seconds=0.5,
    reason="4 of 4 nonces are too far away",
    test="count",
    nonces=4,
    distance=0.5,
    threshold=0.03,
    log_evidence=float("inf"),
    distances=(0.4, 0.5, 0.6, 0.5),
    report={"lines": ["too far"]},
)
ABSTAINED = JobFinding(VerdictOutcome.ABSTAINED, 0.1, reason="too few nonces")


async def convicted(store: FleetStore, job: VerificationJob) -> MemberVerdict:
    await store.verdicts.begin(job.id, "worker-a")
    found = await store.verdicts.finish(job, FRAUD)
    assert found is not None
    return found


async def test_a_job_keeps_its_rule_and_counts_its_workers(store: FleetStore) -> None:
    rule = replace(MARK, tests=("count", "direction"), conviction=AfterConviction.CORDON)
    job, _ = await a_job(store, rule)
    assert await store.verdicts.open_jobs() == [job]
    for worker in ("worker-a", "worker-b"):
        task = await store.verdicts.begin(job.id, worker)
        await store.verdicts.wait_again(job.id)
    assert task is not None
    assert task.job == replace(job, state=JobPhase.RUNNING, attempts=2)
    assert (await store.verdicts.open_jobs())[0].state is JobPhase.QUEUED
    assert await store.verdicts.begin("no such job", "worker-a") is None


async def test_a_sample_is_drawn_by_its_seed_from_the_batches_of_the_job(store: FleetStore) -> None:
    job, lane = await a_job(store, sizes=(8, 16, 8))
    task = await store.verdicts.begin(job.id, "worker-a")
    another = await store.verdicts.begin(job.id, "worker-b")
    assert task is not None
    assert another is not None
    first, again = task.sample, another.sample
    assert first.of == 32
    assert first.nonces.tolist() == again.nonces.tolist()
    assert len(set(first.nonces.tolist())) == 4
    assert (first.vectors == vectors_of(first.nonces.tolist()).values).all()
    assert task.job.lane == lane.lane


async def test_what_the_policy_has_sampled_is_not_sampled_again(store: FleetStore) -> None:
    job, lane = await a_job(store)
    progress = next(e for e in (await store.view()).lanes if e.lane == lane.lane)
    assert (progress.sampled_batch, progress.sampled_stored) == (job.through_batch, 8)
    later = replace(job, id="later", after_batch=job.through_batch)
    await store.verdicts.add([later])
    task = await store.verdicts.begin(later.id, "worker-a")
    assert task is not None
    assert (task.sample.of, len(task.sample.nonces)) == (0, 0)


async def test_a_job_has_one_verdict_whoever_computes_it(store: FleetStore) -> None:
    job, lane = await a_job(store)
    first = await convicted(store, job)
    honest = replace(FRAUD, outcome=VerdictOutcome.HONEST)
    assert await store.verdicts.finish(job, honest) is None
    assert await store.verdicts.begin(job.id, "worker-b") is None
    assert await store.verdicts.open_jobs() == []
    assert await store.verdicts.page(None, 0, 10) == [first]
    assert await store.verdicts.page(lane.member_id, 0, 10) == [first]
    assert await store.verdicts.page("another", 0, 10) == []
    assert await store.verdicts.find(job.id) == (first, {"lines": ["too far"]})
    assert (first.id, first.outcome, first.worker) == (job.id, VerdictOutcome.FRAUD, "worker-a")
    assert first.log_evidence == 1e300
    view = await store.verdicts.view()
    assert view.last == {lane.member_id: first}
    assert view.outcomes == {VerdictOutcome.FRAUD: 1}
    assert view.distances is not None
    assert sum(view.distances.counts) == 4


async def wish_of(store: FleetStore, member_id: str) -> tuple[Wish, str | None]:
    member = next(each for each in await members_of(store) if each.id == member_id)
    return member.wish, member.wish_reason


@pytest.mark.parametrize("conviction", list(AfterConviction))
async def test_only_the_rule_of_cordoning_cordons(
    store: FleetStore, conviction: AfterConviction
) -> None:
    rule = replace(MARK, conviction=conviction, callback_url="http://network")
    job, lane = await a_job(store, rule)
    await convicted(store, job)
    wish, reason = await wish_of(store, lane.member_id)
    assert (wish is Wish.CORDONED) is (conviction is AfterConviction.CORDON)
    if conviction is AfterConviction.CORDON:
        assert reason == f"convicted by verdict {job.id}: 4 of 4 nonces are too far away"


async def test_a_drained_member_stays_drained(store: FleetStore) -> None:
    job, lane = await a_job(store, replace(MARK, conviction=AfterConviction.CORDON))
    await store.wish(lane.member_id, Wish.DRAINING, "a new driver")
    await convicted(store, job)
    assert await wish_of(store, lane.member_id) == (Wish.DRAINING, "a new driver")


@pytest.mark.parametrize("conviction", list(AfterConviction))
async def test_an_abstention_has_no_consequence(
    store: FleetStore, conviction: AfterConviction
) -> None:
    rule = replace(MARK, conviction=conviction, callback_url="http://network")
    job, lane = await a_job(store, rule)
    await store.verdicts.finish(job, ABSTAINED, JobPhase.FAILED)
    assert await wish_of(store, lane.member_id) == (Wish.ACTIVE, None)
    assert (await store.gauges()).pending == 0
    view = await store.verdicts.view()
    assert view.outcomes == {VerdictOutcome.ABSTAINED: 1}
    assert view.jobs == {JobPhase.FAILED: 1}
    assert not view.convicted(lane.member_id)
    found = await store.verdicts.find(job.id)
    assert found is not None
    assert found[1] is None


async def test_a_conviction_queues_one_callback_with_the_verdict(store: FleetStore) -> None:
    rule = replace(MARK, conviction=AfterConviction.CALLBACK, callback_url="http://network")
    job, lane = await a_job(store, rule)
    found = await convicted(store, job)
    await store.verdicts.finish(job, FRAUD)
    (due,) = (await store.plan(CallbackPolicy(), flushing=True)).due
    body: dict[str, Any] = json.loads(await store.body(due))
    assert (due.endpoint, due.url) == ("convicted", "http://network")
    assert (body["id"], body["member_id"], body["outcome"]) == (job.id, lane.member_id, "fraud")
    assert body["number"] == found.number
