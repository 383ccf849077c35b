"""Verdicts as rows. Every function runs inside a transaction of the caller."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, Select, delete, func, select, update

from proofserve.fleet.alpha_spending import DAY_S
from proofserve.fleet.records import Wish
from proofserve.fleet.sql.callbacks import deliveries
from proofserve.fleet.sql.dialects import insert_into
from proofserve.fleet.sql.tables import AnyRow, members, rounds
from proofserve.fleet.sql.texts import kept, kept_if
from proofserve.fleet.sql.verdicts.tables import jobs, verdict_counts, verdicts
from proofserve.fleet.verification_records import (
    AfterConviction,
    DistanceCounts,
    JobCause,
    JobFinding,
    JobPhase,
    MemberVerdict,
    VerdictOutcome,
    VerificationJob,
    VerificationView,
)
from proofserve.wire.paths import CONVICTED

# The newest verdicts whose distances are counted, and into how many bins.
_COUNTED = 200
_BINS = 24
# The most verdicts that one step deletes.
_AT_ONCE = 100
_FAILED_FOR_S = 24 * 3600.0
_OPEN = (JobPhase.QUEUED.value, JobPhase.RUNNING.value)

_VERDICT = (
    *(verdicts.c.number, verdicts.c.job, verdicts.c.member, members.c.name, rounds.c.id),
    *(verdicts.c.lane, jobs.c.cause, verdicts.c.outcome, verdicts.c.reason, verdicts.c.test),
    *(verdicts.c.nonces, verdicts.c.distance, verdicts.c.threshold, verdicts.c.log_evidence),
    *(verdicts.c.p_value, verdicts.c.at, verdicts.c.seconds, verdicts.c.worker),
    verdicts.c.alpha,
)


def add(
    connection: Connection, job: VerificationJob, found: JobFinding, state: JobPhase, now: float
) -> MemberVerdict | None:
    """Store the verdict, the job's end and what follows from a conviction.

    None if the job has a verdict: then nothing is changed.
    """
    ended = update(jobs).where(jobs.c.id == job.id, jobs.c.state.in_(_OPEN))
    worker = connection.execute(
        ended.values(state=state.value, ended_at=now).returning(jobs.c.worker)
    ).first()
    if worker is None:
        return None
    row = _columns(found) | {"job": job.id, "member": job.member_id, "round": job.round_number}
    row |= {"lane": job.lane, "at": now, "worker": worker[0], "alpha": job.alpha}
    inserted = verdicts.insert().values(row).returning(verdicts.c.number)
    number = connection.execute(inserted).scalar_one()
    connection.execute(update(members).where(members.c.id == job.member_id).values(verdict=number))
    counted = insert_into(connection, verdict_counts).values(outcome=found.outcome.value, count=1)
    connection.execute(
        counted.on_conflict_do_update(
            index_elements=[verdict_counts.c.outcome], set_={"count": verdict_counts.c.count + 1}
        )
    )
    stored = _verdict(connection.execute(_joined().where(verdicts.c.number == number)).one())
    if stored.outcome is VerdictOutcome.FRAUD:
        _convict(connection, job, stored, now)
    return stored


def page(
    connection: Connection, member_id: str | None, offset: int, limit: int
) -> list[MemberVerdict]:
    """Verdicts, the newest first."""
    chosen = _joined().order_by(verdicts.c.number.desc()).offset(offset).limit(limit)
    if member_id is not None:
        chosen = chosen.where(verdicts.c.member == kept(member_id))
    return [_verdict(row) for row in connection.execute(chosen)]


def find(connection: Connection, job_id: str) -> tuple[MemberVerdict, dict[str, Any] | None] | None:
    """A verdict and its report."""
    row = connection.execute(
        _joined(verdicts.c.report).where(verdicts.c.job == kept(job_id))
    ).first()
    if row is None:
        return None
    # What is not finite is a text.
    report = None if row.report is None else json.loads(row.report, parse_constant=str)
    return _verdict(row[:-1]), report


def view(connection: Connection, now: float) -> VerificationView:
    """Its size is bounded by the number of members."""
    chosen = _joined().where(members.c.verdict == verdicts.c.number, members.c.removed_at.is_(None))
    last = [_verdict(row) for row in connection.execute(chosen)]
    waiting = select(jobs.c.state, func.count(), func.min(jobs.c.asked_at))
    found = list(connection.execute(waiting.where(jobs.c.state.in_(_OPEN)).group_by(jobs.c.state)))
    failed = select(func.count()).where(
        jobs.c.state == JobPhase.FAILED.value, jobs.c.ended_at > now - _FAILED_FOR_S
    )
    counts = {JobPhase(row[0]): row[1] for row in found}
    counts[JobPhase.FAILED] = connection.execute(failed).scalar_one()
    outcomes = connection.execute(select(verdict_counts.c.outcome, verdict_counts.c.count))
    return VerificationView(
        last={each.member_id: each for each in last},
        jobs=counts,
        outcomes={VerdictOutcome(row[0]): row[1] for row in outcomes},
        oldest_asked_at=min((row[2] for row in found), default=None),
        distances=_distances(connection),
    )


def old(connection: Connection, before: float, now: float) -> list[str]:
    """Some jobs with a verdict from before ``before``, which is not its member's newest one.

    Jobs of the day before ``now`` stay, whose shares of alpha are counted.
    """
    newest = select(members.c.id).where(members.c.verdict == verdicts.c.number)
    chosen = select(verdicts.c.job).join(jobs, jobs.c.id == verdicts.c.job)
    chosen = chosen.where(verdicts.c.at < before, jobs.c.asked_at <= now - DAY_S, ~newest.exists())
    return list(connection.execute(chosen.order_by(verdicts.c.number).limit(_AT_ONCE)).scalars())


def delete_with_jobs(connection: Connection, job_ids: Sequence[str]) -> None:
    """Delete verdicts and their jobs; what is counted of them stays."""
    connection.execute(delete(verdicts).where(verdicts.c.job.in_(job_ids)))
    connection.execute(delete(jobs).where(jobs.c.id.in_(job_ids)))


def _convict(
    connection: Connection, job: VerificationJob, stored: MemberVerdict, now: float
) -> None:
    rule = job.rule
    if rule.conviction is AfterConviction.CORDON:
        text = f"convicted by verdict {stored.id}: {stored.reason or stored.test}"
        wish = {"wish": Wish.CORDONED.value, "wish_reason": kept(text)}
        # A member that is drained stays drained.
        active = (members.c.id == job.member_id) & (members.c.wish == Wish.ACTIVE.value)
        connection.execute(update(members).where(active).values(**wish))
    if rule.conviction is AfterConviction.CALLBACK and rule.callback_url is not None:
        body = json.dumps(
            {name: getattr(stored, name) for name in MemberVerdict.__slots__}, allow_nan=False
        )
        deliveries.add_body(connection, CONVICTED, rule.callback_url, body, now)


def _distances(connection: Connection) -> DistanceCounts | None:
    newest = select(verdicts.c.distances, verdicts.c.threshold).where(
        verdicts.c.outcome != VerdictOutcome.ABSTAINED.value
    )
    rows = list(connection.execute(newest.order_by(verdicts.c.number.desc()).limit(_COUNTED)))
    found = [np.frombuffer(row.distances, "<f4") for row in rows]
    distances = np.concatenate(found) if found else np.empty(0, np.float32)
    if not len(distances):
        return None
    thresholds = {row.threshold for row in rows}
    threshold = thresholds.pop() if len(thresholds) == 1 else None
    top = max(float(distances.max()), threshold or 0.0) * 1.05 or 1.0
    counts, edges = np.histogram(distances, bins=_BINS, range=(0.0, top))
    return DistanceCounts(tuple(edges.tolist()), tuple(counts.tolist()), len(rows), threshold)


def _columns(found: JobFinding) -> dict[str, Any]:
    report = found.report
    return {
        "outcome": found.outcome.value,
        "reason": kept_if(found.reason),
        "test": found.test,
        "nonces": found.nonces,
        "distance": _finite(found.distance),
        "threshold": _finite(found.threshold),
        "log_evidence": _finite(found.log_evidence),
        "p_value": _finite(found.p_value),
        "seconds": found.seconds,
        "distances": np.array(found.distances, "<f4").tobytes(),
        "report": None if report is None else json.dumps(report),
    }


def _finite(value: float | None) -> float | None:
    """JSON has no other numbers. Evidence beyond all bounds has the largest one."""
    if value is None or math.isnan(value):
        return None
    return value if math.isfinite(value) else math.copysign(1e300, value)


def _joined(*more: Any) -> Select[tuple[Any, ...]]:
    return (
        select(*_VERDICT, *more)
        .join(jobs, jobs.c.id == verdicts.c.job)
        .join(members, members.c.id == verdicts.c.member)
        .join(rounds, rounds.c.number == verdicts.c.round)
    )


def _verdict(row: AnyRow | Sequence[Any]) -> MemberVerdict:
    number, id_, member, name, round_id, lane, cause, outcome, *rest = row
    return MemberVerdict(
        number, id_, member, name, round_id, lane, JobCause(cause), VerdictOutcome(outcome), *rest
    )
