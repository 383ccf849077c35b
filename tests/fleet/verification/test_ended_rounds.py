"""What a member has proved since its last sample is judged, also when the round was replaced."""

from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

from fleet.sql.support import MARK, a_lane, a_spec, nonces_of, vectors_of
from proofserve.api.node import Deployment
from proofserve.fleet.job_queues import JobSender
from proofserve.fleet.members import Rules
from proofserve.fleet.records import FleetRound, Lane
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification import VerificationControl, VerificationPolicy
from proofserve.fleet.verification_records import VerificationJob
from proofserve.fleet.watch import FleetWatch
from proofserve.rounds.state import Move
from support.fake_engine import TOY_ENGINE_INFO

pytestmark = pytest.mark.anyio

HOUR_S = 3600.0
RULE = replace(MARK, every_s=HOUR_S)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Verified:
    """A fleet's rows and the leader's part of verification, on one clock."""

    def __init__(self, store: FleetStore, database: str, clock: Clock, sender: JobSender) -> None:
        self.store = store
        self.clock = clock
        self._sender = sender
        limits = Deployment(TOY_ENGINE_INFO, enabled=True)
        self._watch = FleetWatch(store, Rules(), limits, clock=clock)
        policy = VerificationPolicy(RULE)
        opened = partial(JobSender, database)
        self._control = VerificationControl(store.verdicts, self._watch, policy, opened)

    async def add(self, round_: FleetRound, lane: Lane, start: int, size: int) -> None:
        found = vectors_of(nonces_of(round_, lane, start, size))
        await self.store.ingest(round_, lane, f"k{start}", found)

    async def jobs_after(self, seconds: float) -> list[VerificationJob]:
        """The open jobs after a pass, so many seconds later."""
        self.clock.now += seconds
        await self._watch.refresh()
        await self._control.step(self._sender)
        return await self.store.verdicts.open_jobs()

    async def next_round(self) -> tuple[FleetRound, Lane]:
        await self.store.move(Move.STOP)
        return await a_lane(self.store, a_spec("new"))

    async def sampled_once(self) -> tuple[FleetRound, Lane]:
        """A round of which the first nonces were sampled, and then as many were stored again."""
        round_, lane = await a_lane(self.store, a_spec("old"))
        await self.add(round_, lane, 0, 4)
        (job,) = await self.jobs_after(0.0)
        # As if its verdict were there.
        await self.store.verdicts.delete([job.id])
        await self.add(round_, lane, 4, 4)
        assert await self.jobs_after(60.0) == []
        return round_, lane


@pytest.fixture
async def verified(url: str) -> AsyncIterator[Verified]:
    clock = Clock()
    async with await FleetStore.open(url, clock) as store:
        with closing(JobSender(url)) as sender:
            yield Verified(store, url, clock, sender)


async def test_a_round_that_was_replaced_is_sampled_once_more(verified: Verified) -> None:
    old, _ = await verified.sampled_once()
    new, lane = await verified.next_round()
    # Its member may still deliver.
    assert await verified.jobs_after(9.0) == []
    (job,) = await verified.jobs_after(1.0)
    assert (job.round_number, job.lane) == (old.number, 0)
    task = await verified.store.verdicts.begin(job.id, "worker")
    assert task is not None
    # Only what is new since the sample before.
    assert sorted(task.sample.nonces) == sorted(old.nonces_of(0).batch(4, 4))
    assert await verified.jobs_after(HOUR_S) == [task.job]
    await verified.add(new, lane, 0, 4)
    assert [each.round_number for each in await verified.jobs_after(0.0)] == [
        old.number,
        new.number,
    ]


async def test_a_round_that_was_stopped_is_sampled_once_more(verified: Verified) -> None:
    old, lane = await verified.sampled_once()
    await verified.store.move(Move.STOP)
    verified.clock.now += 9.0
    await verified.add(old, lane, 8, 1)
    assert await verified.jobs_after(9.0) == []
    (job,) = await verified.jobs_after(1.0)
    task = await verified.store.verdicts.begin(job.id, "worker")
    assert task is not None
    assert task.sample.of == 5


async def test_rounds_that_ended_long_ago_are_left_alone(verified: Verified) -> None:
    await verified.sampled_once()
    await verified.next_round()
    assert await verified.jobs_after(601.0) == []
