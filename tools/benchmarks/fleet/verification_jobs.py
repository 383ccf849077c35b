"""Jobs of verification as rows of a database, and how long workers take for them."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.fleet.deployment import START_S
from measuring.processes import Process, ProcessFailed
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


class _NothingDue:
    """The part of ``FleetWatch`` that the control reads: the policy wants no sample."""

    current = Overview(FleetView(0.0, (), DesiredState(), ()), (), (), {}, None)


async def jobs_s(
    database: str,
    pattern: VerificationJob,
    store: FleetStore,
    workers: Sequence[Process],
    count: int,
) -> float:
    """Seconds from making ``count`` jobs like ``pattern`` to the last verdict.

    Each of the ``workers`` has computed a job before, for which it loads its checkpoint. Raises
    ProcessFailed if one has ended or abstains.
    """
    watch: Any = _NothingDue()
    sender = partial(JobSender, database)
    control = VerificationControl(store.verdicts, watch, VerificationPolicy(), sender)

    async def run(count: int) -> tuple[float, set[str | None]]:
        names = [uuid.uuid4().hex for _ in range(count)]
        began = time.perf_counter()
        await store.verdicts.add(
            [replace(pattern, id=name, seed=name, asked_at=time.time()) for name in names]
        )
        control.wake()
        while await store.verdicts.open_jobs():
            if ended := [each for each in workers if each.code is not None]:
                raise ProcessFailed("; ".join(each.last_line for each in ended))
            await asyncio.sleep(_LOOK_S)
        seconds = time.perf_counter() - began
        verdicts = await store.verdicts.page(None, 0, count)
        for each in verdicts:
            if each.outcome is not VerdictOutcome.HONEST:
                raise ProcessFailed(f"a verdict is {each.outcome}: {each.reason}")
        return seconds, {each.worker for each in verdicts}

    async with beside("verification", control.run()):
        deadline, seen = time.monotonic() + START_S, set[str | None]()
        while len(seen) < len(workers):
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{len(seen)} of {len(workers)} workers have taken a job")
            seen |= (await run(2 * len(workers)))[1]
        return (await run(count))[0]


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
