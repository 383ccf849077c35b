"""Jobs as rows. Every function runs inside a transaction of the caller."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import Connection, func, select, update

from proofserve.fleet.alpha_spending import DAY_S, share_of_day
from proofserve.fleet.records import FleetRound, LaneProgress
from proofserve.fleet.sql import lanes, rounds
from proofserve.fleet.sql.dialects import insert_into
from proofserve.fleet.sql.tables import AnyRow, batches, members
from proofserve.fleet.sql.tables import lanes as lanes_table
from proofserve.fleet.sql.verdicts.tables import calibrations, jobs
from proofserve.fleet.verification_records import (
    AfterConviction,
    JobCause,
    JobPhase,
    VerificationJob,
    VerificationRule,
)

# The newest rounds that are looked at, however fast they follow each other.
_MOST_ENDED = 8
_OPEN = jobs.c.state.in_([JobPhase.QUEUED.value, JobPhase.RUNNING.value])


def add_calibration(connection: Connection, content: str) -> str:
    """Keep the content of a calibration; returns its digest, by which rules name it."""
    digest = hashlib.sha256(content.encode()).hexdigest()
    added = insert_into(connection, calibrations).values(digest=digest, content=content)
    connection.execute(added.on_conflict_do_nothing(index_elements=[calibrations.c.digest]))
    return digest


def calibration(connection: Connection, digest: str) -> str:
    chosen = select(calibrations.c.content).where(calibrations.c.digest == digest)
    return str(connection.execute(chosen).scalar_one())


def add(connection: Connection, made: Sequence[VerificationJob]) -> list[VerificationJob]:
    """Store new jobs with their shares of alpha, and what the policy has sampled of their lanes."""
    stored = []
    for each in made:
        job = replace(each, alpha_share=_share(connection, each))
        stored.append(job)
        connection.execute(jobs.insert().values(_columns(job)))
        if job.cause is JobCause.OPERATOR:
            continue
        columns = lanes_table.c
        of_lane = (columns.round == job.round_number) & (columns.lane == job.lane)
        sampled = {"sampled_at": job.asked_at, "sampled_batch": job.through_batch}
        counted = update(lanes_table).where(of_lane)
        connection.execute(counted.values(**sampled, sampled_stored=columns.stored))
    return stored


def _share(connection: Connection, job: VerificationJob) -> float:
    # The row of the member is locked, so that no other controller spends the same alpha.
    member = select(members.c.id).where(members.c.id == job.member_id)
    connection.execute(member.with_for_update(key_share=True))
    # What another controller's clock, which is ahead, has stored counts too.
    of_day = (jobs.c.member == job.member_id) & (jobs.c.asked_at > job.asked_at - DAY_S)
    sums = select(func.coalesce(func.sum(jobs.c.alpha_share), 0.0), func.count()).where(of_day)
    spent, verified = connection.execute(sums).one()
    return share_of_day(spent, verified, job.rule.planned_per_day)


def newest_batches(connection: Connection, round_number: int) -> dict[int, int]:
    """The number of the newest batch of each lane of a round."""
    chosen = select(batches.c.lane, func.max(batches.c.number)).where(
        batches.c.round == round_number
    )
    return {row[0]: row[1] for row in connection.execute(chosen.group_by(batches.c.lane))}


def ended_lanes(
    connection: Connection, before_round: int, since: float
) -> list[tuple[FleetRound, LaneProgress]]:
    """The lanes with new nonces, of rounds below ``before_round`` that ended after ``since``."""
    return [
        (round_, progress)
        for round_ in rounds.ended_before(connection, before_round, _MOST_ENDED, since)
        for progress in lanes.progress(connection, round_.number)
        if progress.stored > progress.sampled_stored
    ]


def open_ones(connection: Connection) -> list[VerificationJob]:
    """The jobs that wait or run, oldest first."""
    return [_job(row) for row in connection.execute(select(jobs).where(_OPEN).order_by("number"))]


def find(connection: Connection, job_id: str) -> VerificationJob | None:
    row = connection.execute(select(jobs).where(jobs.c.id == job_id)).first()
    return None if row is None else _job(row)


def begin(connection: Connection, job_id: str, worker: str, now: float) -> VerificationJob | None:
    """Note that ``worker`` begins; None for a job that has ended, or that is unknown."""
    began = {"state": JobPhase.RUNNING.value, "worker": worker, "started_at": now}
    row = connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id, _OPEN)
        .values(**began, attempts=jobs.c.attempts + 1)
        .returning(jobs)
    ).first()
    return None if row is None else _job(row)


def wait_again(connection: Connection, job_id: str) -> None:
    """Note that the worker of a running job is gone."""
    running = (jobs.c.id == job_id) & (jobs.c.state == JobPhase.RUNNING.value)
    connection.execute(update(jobs).where(running).values(state=JobPhase.QUEUED.value))


def _columns(job: VerificationJob) -> dict[str, Any]:
    return {
        "id": job.id,
        "member": job.member_id,
        "round": job.round_number,
        "lane": job.lane,
        "cause": job.cause.value,
        "queue": job.queue,
        "rule": json.dumps(asdict(job.rule)),
        "weights_digest": job.weights_digest,
        "model": job.model,
        "seed": job.seed,
        "after_batch": job.after_batch,
        "through_batch": job.through_batch,
        "asked_at": job.asked_at,
        "alpha_share": job.alpha_share,
    }


def _job(row: AnyRow) -> VerificationJob:
    return VerificationJob(
        id=row.id,
        member_id=row.member,
        round_number=row.round,
        lane=row.lane,
        cause=JobCause(row.cause),
        queue=row.queue,
        rule=_rule(row.rule),
        weights_digest=row.weights_digest,
        model=row.model,
        seed=row.seed,
        after_batch=row.after_batch,
        through_batch=row.through_batch,
        asked_at=row.asked_at,
        state=JobPhase(row.state),
        attempts=row.attempts,
        alpha_share=row.alpha_share,
    )


def _rule(text: str) -> VerificationRule:
    fields = json.loads(text)
    known = {
        **fields,
        "tests": tuple(fields["tests"]),
        "conviction": AfterConviction(fields["conviction"]),
    }
    return VerificationRule(**known)
