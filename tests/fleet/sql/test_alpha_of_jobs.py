"""The alpha of a day as rows: restarts, several controllers and deleted jobs."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from proofserve.fleet.records import MemberSource
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification_records import (
    DAY_S,
    JobCause,
    JobFinding,
    VerdictOutcome,
    VerificationJob,
)

from .support import MARK, a_job

pytestmark = pytest.mark.anyio

NOW = 1_000_000.0
HONEST = JobFinding(VerdictOutcome.HONEST, 0.1, report={"lines": []})
RULE = replace(MARK, every_s=None, every_nonces=4, alpha_per_day=1e-3)
SERIES = [1 / (k * (k + 1)) for k in range(1, 100)]


def later(job: VerificationJob, number: int, asked_at: float) -> VerificationJob:
    return replace(job, id=f"job-{number}", asked_at=asked_at, cause=JobCause.OPERATOR)


def spent(jobs: Sequence[VerificationJob]) -> list[float]:
    return [job.alpha_share for job in jobs]


async def test_a_restart_goes_on_with_the_day_and_operators_spend_it_too(url: str) -> None:
    async with await FleetStore.open(url) as store:
        first, _ = await a_job(store, RULE)
        (second,) = await store.verdicts.add([later(first, 2, first.asked_at + 60.0)])
    async with await FleetStore.open(url) as store:
        in_a_day, after_it = first.asked_at + DAY_S - 1.0, first.asked_at + DAY_S
        made = [later(first, 3, in_a_day), later(first, 4, after_it)]
        third, fourth = await store.verdicts.add(made)
        stored = await store.verdicts.open_jobs()
    assert spent([first, second, third]) == pytest.approx(SERIES[:3])
    # The first one is more than a day old: of the others, 1/6 and 1/12 are spent.
    assert fourth.alpha_share == pytest.approx((1 - 1 / 6 - 1 / 12) / 4)
    assert stored == [first, second, third, fourth]
    assert second.alpha == pytest.approx(1e-3 / 6)


async def test_another_member_has_an_alpha_of_its_own(store: FleetStore) -> None:
    job, _ = await a_job(store, RULE)
    other = await store.put_member("http://other", "other", MemberSource.LIST)
    about_it = replace(later(job, 2, job.asked_at), member_id=other.id)
    (of_other,) = await store.verdicts.add([about_it])
    assert of_other.alpha_share == SERIES[0]


async def test_two_controllers_spend_one_alpha(url: str) -> None:
    async with await FleetStore.open(url) as one, await FleetStore.open(url) as other:
        first, _ = await a_job(one, RULE)
        calls = [
            store.verdicts.add([later(first, 2 * number + of, first.asked_at)])
            for number in range(1, 21)
            for of, store in enumerate((one, other))
        ]
        made = [jobs[0] for jobs in await asyncio.gather(*calls)]
    assert sorted(spent([first, *made]), reverse=True) == pytest.approx(SERIES[:41])


async def test_a_day_of_verdicts_spends_at_most_its_alpha_and_each_verdict_states_its_own(
    store: FleetStore,
) -> None:
    rule = replace(MARK, every_s=600.0, alpha_per_day=1e-3)
    first, lane = await a_job(store, rule)
    times = [first.asked_at + 600.0 * number for number in range(1, 200)]
    made = await store.verdicts.add([later(first, n, at) for n, at in enumerate(times)])
    for job in (first, *made):
        await store.verdicts.finish(job, HONEST)
    verdicts = await store.verdicts.page(lane.member_id, 0, 500)
    alphas = {verdict.id: verdict.alpha or 0.0 for verdict in verdicts}
    assert len(alphas) == 200
    assert alphas == {job.id: job.alpha for job in (first, *made)}
    in_order = [alphas[job.id] for job in (first, *made)]
    days = [sum(in_order[start : start + 144]) for start in range(57)]
    assert 0.4e-3 < max(days) <= 1e-3


async def test_verdicts_of_the_last_day_are_not_deleted(url: str) -> None:
    now = NOW
    async with await FleetStore.open(url, lambda: now) as store:
        pattern, _ = await a_job(store, RULE)
        made = await store.verdicts.add([later(pattern, 2, NOW), later(pattern, 3, NOW)])
        for job in made:
            await store.verdicts.finish(job, HONEST)
        now = NOW + DAY_S - 1.0
        assert await store.verdicts.old(60.0) == []
        now = NOW + DAY_S
        assert await store.verdicts.old(60.0) == [made[0].id]
