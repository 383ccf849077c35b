"""Jobs and verdicts as rows: one verdict for a job, and what follows from a conviction."""

import json
import uuid
from dataclasses import replace
from typing import Any

import pytest

from proofserve.fleet.records import Wish
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification_records import (
    RECENT,
    AfterConviction,
    JobFinding,
    JobPhase,
    MemberVerdict,
    StoredSample,
    VerdictOutcome,
    VerificationJob,
)
from proofserve.outbox.planning import CallbackPolicy

from .support import MARK, a_job, members_of, nonces_of, round_of, vectors_of

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
UNPROVED = JobFinding(
    VerdictOutcome.UNPROVED, 0.1, reason="refused: 40 of 40 drawn nonces are not opened"
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


async def test_nonces_that_a_member_left_out_are_drawn_and_missing(store: FleetStore) -> None:
    job, lane = await a_job(store, replace(MARK, nonces=32))
    opened = await round_of(store, lane.round_id)
    assert opened is not None

    async def sample_of(after: int, *batches: tuple[int, ...]) -> StoredSample:
        for nonces in batches:
            await store.ingest(opened, lane, uuid.uuid4().hex, vectors_of(nonces))
        through = (await store.verdicts.newest_batches(opened.number))[lane.lane]
        made = replace(job, id=uuid.uuid4().hex, after_batch=after, through_batch=through)
        await store.verdicts.add([made])
        task = await store.verdicts.begin(made.id, "worker-a")
        assert task is not None
        return task.sample

    half = await sample_of(0, nonces_of(opened, lane, 24, 8))
    assert (half.of, len(half.nonces), half.missing) == (16, 16, 16)
    assert (half.vectors == vectors_of(half.nonces.tolist()).values).all()
    before = (await store.verdicts.newest_batches(opened.number))[lane.lane]
    # A callback that had expired comes late: it is no gap of its own.
    late = await sample_of(before, nonces_of(opened, lane, 8, 8))
    assert (late.of, len(late.nonces), late.missing) == (8, 8, 0)
    # However high a nonce is: as many are drawn from as twice those that came.
    before = (await store.verdicts.newest_batches(opened.number))[lane.lane]
    high = await sample_of(before, nonces_of(opened, lane, 10**12, 1))
    assert (high.of, len(high.nonces), high.missing) == (1, 0, 2)


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


async def unproved(store: FleetStore, job: VerificationJob, times: int) -> MemberVerdict:
    """After so many more jobs of which the member did not show all."""
    found = None
    for _ in range(times):
        again = replace(job, id=uuid.uuid4().hex)
        await store.verdicts.add([again])
        found = await store.verdicts.finish(again, UNPROVED)
    assert found is not None
    return found


async def test_a_member_with_too_large_a_share_of_unproved_jobs_gets_nothing_new(
    store: FleetStore,
) -> None:
    job, lane = await a_job(store)
    last = await unproved(store, job, 5)
    assert (last.unproved, await wish_of(store, lane.member_id)) == (5, (Wish.ACTIVE, None))
    # What the fleet lacked says nothing about the member.
    await store.verdicts.finish(job, ABSTAINED, JobPhase.FAILED)
    last = await unproved(store, job, 1)
    reason = "unproved in 6 of its newest 20 jobs: refused: 40 of 40 drawn nonces are not opened"
    assert (last.unproved, await wish_of(store, lane.member_id)) == (6, (Wish.CORDONED, reason))
    view = await store.verdicts.view()
    assert view.outcomes == {VerdictOutcome.UNPROVED: 6, VerdictOutcome.ABSTAINED: 1}
    assert (view.last[lane.member_id].outcome, view.last[lane.member_id].unproved) == (
        VerdictOutcome.UNPROVED,
        6,
    )
    # An operator takes it back; the next job that it does not prove counts the ones before.
    await store.wish(lane.member_id, Wish.ACTIVE, None)
    again = replace(job, id="again")
    await store.verdicts.add([again])
    await store.verdicts.finish(again, replace(FRAUD, outcome=VerdictOutcome.HONEST))
    assert await wish_of(store, lane.member_id) == (Wish.ACTIVE, None)
    assert (await unproved(store, job, 1)).unproved == 7
    assert (await wish_of(store, lane.member_id))[0] is Wish.CORDONED


async def test_only_the_newest_jobs_of_a_member_count(store: FleetStore) -> None:
    job, lane = await a_job(store, replace(MARK, unproved_share=1.0))
    assert (await unproved(store, job, RECENT + 2)).unproved == RECENT
    # With a limit of all jobs none is too many.
    assert await wish_of(store, lane.member_id) == (Wish.ACTIVE, None)


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
