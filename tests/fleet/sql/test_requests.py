"""Jobs of /generate as rows: each ends once, with its callback, whichever controller ends it."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from proofserve.fleet.sql.requests import RequestStore, read_job
from proofserve.fleet.sql.store import FleetStore
from proofserve.outbox.planning import CallbackPolicy
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.errors import Refusal
from proofserve.rounds.records import (
    CompletedJob,
    Job,
    JobState,
    JobView,
    Limits,
    Outcome,
    Proofs,
    StatTest,
    Verdict,
)
from rounds.doubles import job
from support.refusals import refused

pytestmark = pytest.mark.anyio

URL = "http://network"
CLAIMS = (Claim(1, "AAAA"), Claim(2, ""))
BY_COUNT = StatTest(dist_threshold=0.03, p_mismatch=0.01)
PROOFS = Proofs((Claim(1, "AAAA"), Claim(2**62, "BBBB")), {3: "not finite"})
KEEP_S = 60.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(url: str, clock: Clock) -> AsyncIterator[FleetStore]:
    async with await FleetStore.open(url, clock) as opened:
        yield opened


@pytest.fixture
def requests(store: FleetStore) -> RequestStore:
    return store.requests


async def begun_by(requests: RequestStore) -> tuple[str, Job, int]:
    begun = await requests.begin()
    assert begun is not None
    request_id, text, attempt = begun
    return request_id, read_job(text), attempt


async def added(requests: RequestStore, *ids: str, one: Job | None = None) -> None:
    for each in ids:
        await requests.add(each, one or job(1, 2), 100)


async def state(requests: RequestStore, request_id: str) -> JobState:
    view = await requests.view(request_id, KEEP_S)
    assert view is not None
    return view.state


async def callbacks(store: FleetStore) -> list[bytes]:
    plan = await store.plan(CallbackPolicy(), flushing=True)
    return [await store.body(each) for each in plan.due]


@pytest.mark.parametrize(
    ("one", "outcome"),
    [
        (job(1, 2**62, 3), PROOFS),
        (job(1, 2, claims=CLAIMS, test=BY_COUNT), Verdict(2, 0, (), 1.0, False)),
    ],
)
async def test_a_job_and_its_outcome_are_read_as_they_were_stored(
    requests: RequestStore, one: Job, outcome: Outcome
) -> None:
    await requests.add("a", one, 100)
    assert await requests.view("a", KEEP_S) == JobView("a", JobState.QUEUED)
    assert await begun_by(requests) == ("a", one, 1)
    assert await requests.view("a", KEEP_S) == JobView("a", JobState.RUNNING)
    completed = CompletedJob("a", one, outcome)
    assert await requests.finish(completed)
    assert await requests.view("a", KEEP_S) == JobView("a", JobState.COMPLETED, completed)


async def test_jobs_begin_in_their_order_and_an_open_one_begins_again(
    requests: RequestStore,
) -> None:
    await added(requests, "b", "a")
    # The second call is that of another leader.
    for attempt in (1, 2):
        assert await begun_by(requests) == ("b", job(1, 2), attempt)
    assert await requests.fail("b", "the engine is gone\0")
    assert await begun_by(requests) == ("a", job(1, 2), 1)
    view = await requests.view("b", KEEP_S)
    assert view == JobView(
        "b", JobState.FAILED, error="the engine is gone\N{REPLACEMENT CHARACTER}"
    )
    await requests.cancel_all()
    assert await requests.begin() is None


async def test_a_job_has_one_end_and_one_callback(
    store: FleetStore, requests: RequestStore
) -> None:
    one = job(1, url=URL)
    await added(requests, "a", "b", one=one)
    done = CompletedJob("a", one, PROOFS)
    assert await requests.finish(done)
    assert not await requests.finish(done)
    assert not await requests.fail("a", "too late")
    await requests.cancel_all()
    assert not await requests.finish(replace(done, request_id="b"))
    assert not await requests.is_open("b")
    assert [await state(requests, each) for each in "ab"] == ["completed", "cancelled"]
    (body,) = await callbacks(store)
    assert b'"request_id":"a"' in body
    assert (await store.gauges()).pending == 1


async def test_the_limit_is_that_of_all_waiting_jobs(
    store: FleetStore, requests: RequestStore
) -> None:
    await requests.add("a", job(*range(6)), 10)
    await requests.begin()
    with refused(Refusal.QUEUE_FULL, match="Queue full: 6 nonces queued, limit is 10"):
        await requests.add("b", job(*range(5)), 10)
    assert await requests.view("b", KEEP_S) is None
    assert (await store.view()).queued_nonces == 6
    await requests.fail("a", "a fault")
    await requests.add("b", job(*range(5)), 10)
    assert (await store.view()).queued_nonces == 5


async def test_a_result_expires(requests: RequestStore, clock: Clock) -> None:
    await added(requests, "a", "b")
    await requests.fail("a", "a fault")
    clock.now += KEEP_S
    assert await requests.view("a", KEEP_S) is None
    assert await requests.view("a", KEEP_S + 1) is not None
    await requests.expire(Limits(result_ttl_s=KEEP_S))
    assert await requests.view("a", KEEP_S + 1) is None
    assert await state(requests, "b") is JobState.QUEUED


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (Limits(max_kept_jobs=2), ["c", "d"]),
        (Limits(max_kept_nonces=7), ["b", "c", "d"]),
        (Limits(max_kept_nonces=5), ["c", "d"]),
        # The newest stays: no client has read it yet.
        (Limits(max_kept_nonces=1), ["d"]),
        (Limits(max_kept_jobs=0), ["d"]),
    ],
)
async def test_the_oldest_of_too_many_results_go(
    requests: RequestStore, limits: Limits, left: list[str]
) -> None:
    await added(requests, "a", "b", "c", "d", "open")
    for each in "abcd":
        await requests.fail(each, "a fault")
    await requests.expire(limits)
    assert [each for each in "abcd" if await requests.view(each, KEEP_S)] == left
    assert await requests.is_open("open")
