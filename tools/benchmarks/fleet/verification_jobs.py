"""Jobs of verification as rows of a database, and how long workers take for them."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from measuring.processes import ProcessFailed
from proofserve.fleet.job_queues import JobSender
from proofserve.fleet.records import DesiredState, FleetView, Lane, MemberFindings, MemberSource
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification import VerificationControl, VerificationPolicy
from proofserve.fleet.verification_records import (
    JobCause,
    VerdictOutcome,
    VerificationJob,
    VerificationRule,
)
from proofserve.fleet.watch import Overview
from proofserve.protocol.nonces import NonceLane
from proofserve.rounds.records import RoundSpec, Workload
from proofserve.rounds.state import Move
from proofserve.rounds.tasks import beside

_LOOK_S = 0.05
_READY_S = 180.0


class _NothingDue:
    """The part of ``FleetWatch`` that the control reads: the policy wants no sample."""

    current = Overview(FleetView(0.0, (), DesiredState(), ()), (), (), {}, None)


class JobBench:
    """Makes jobs like ``pattern``. ``alive`` raises ProcessFailed if a worker has ended."""

    def __init__(
        self,
        store: FleetStore,
        control: VerificationControl,
        pattern: VerificationJob,
        alive: Callable[[], None],
    ) -> None:
        self._store = store.verdicts
        self._control = control
        self._pattern = pattern
        self._alive = alive

    async def run(self, count: int) -> tuple[float, set[str | None]]:
        """Seconds from making ``count`` jobs to the last verdict, and the workers' names.

        Raises ProcessFailed.
        """
        names = [uuid.uuid4().hex for _ in range(count)]
        made = [replace(self._pattern, id=name, seed=name, asked_at=time.time()) for name in names]
        began = time.perf_counter()
        await self._store.add(made)
        self._control.wake()
        while await self._store.open_jobs():
            self._alive()
            await asyncio.sleep(_LOOK_S)
        seconds = time.perf_counter() - began
        verdicts = await self._store.page(None, 0, count)
        for each in verdicts:
            if each.outcome is not VerdictOutcome.HONEST:
                raise ProcessFailed(f"a verdict is {each.outcome}: {each.reason}")
        return seconds, {each.worker for each in verdicts}

    async def until_each_has_worked(self, workers: int) -> None:
        """Have every worker compute a job: it loads its checkpoint then. Raises ProcessFailed."""
        deadline = time.monotonic() + _READY_S
        seen: set[str | None] = set()
        while len(seen) < workers:
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{len(seen)} of {workers} workers have taken a job")
            seen |= (await self.run(2 * workers))[1]


@asynccontextmanager
async def job_bench(
    database: str, pattern: VerificationJob, store: FleetStore, alive: Callable[[], None]
) -> AsyncIterator[JobBench]:
    """The leader's part of verification works until the context ends."""
    watch: Any = _NothingDue()
    sender = partial(JobSender, database)
    control = VerificationControl(store.verdicts, watch, VerificationPolicy(), sender)
    async with beside("verification", control.run()):
        yield JobBench(store, control, pattern, alive)


async def a_pattern(
    store: FleetStore, work: Workload, found: MemberFindings, queue: str, rule: VerificationRule
) -> VerificationJob:
    """A job about ``found``, the first nonces of a new round's one lane; it is not stored."""
    spec = RoundSpec(uuid.uuid4().hex, work, NonceLane(0, 1), 32, None)
    opened = await store.open_round(spec, 1)
    member = await store.put_member("http://member", "member", MemberSource.LIST)
    (lane,) = await store.give_lanes(opened.id, [member.id])
    if not isinstance(lane, Lane):
        raise lane
    await store.ingest(opened, lane, "key", found)
    await store.move(Move.STOP)
    return VerificationJob(
        id="",
        member_id=member.id,
        round_number=opened.number,
        lane=lane.lane,
        cause=JobCause.OPERATOR,
        queue=queue,
        rule=rule,
        weights_digest=None,
        model=None,
        seed="",
        after_batch=0,
        through_batch=(await store.verdicts.newest_batches(opened.number))[lane.lane],
        asked_at=0.0,
    )
