"""Verification as rows: jobs, the samples that workers recompute for them, and verdicts."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from sqlalchemy import Connection, Select, delete, func, select, update

from proofserve.fleet.records import BatchKind, FleetRound, Lane, Member, Wish
from proofserve.fleet.sql.batches import integers, vectors
from proofserve.fleet.sql.callbacks import DeliveryStore
from proofserve.fleet.sql.database import FleetDatabase
from proofserve.fleet.sql.locks import is_held
from proofserve.fleet.sql.rounds import active_members, find_member, lanes_where, rounds_where
from proofserve.fleet.sql.tables import (
    AnyRow,
    batches,
    calibrations,
    deleted_spans,
    insert_into,
    jobs,
    kept_if,
    lanes,
    members,
    rounds,
    verdict_counts,
    verdicts,
)
from proofserve.fleet.verification_records import (
    DAY_S,
    RECENT,
    AfterConviction,
    DistanceCounts,
    JobCause,
    JobFinding,
    JobPhase,
    JudgedBy,
    MemberVerdict,
    StoredSample,
    VerdictOutcome,
    VerificationJob,
    VerificationTask,
    VerificationView,
)
from proofserve.outbox.database import StorePart, announces, kept, reads, writes
from proofserve.protocol.nonces import NonceLane, draw
from proofserve.protocol.verdict.counting import share_of_alpha
from proofserve.wire import CONVICTED

# The newest rounds that are looked at, however fast they follow each other.
_MOST_ENDED = 8
_OPEN = jobs.c.state.in_([JobPhase.QUEUED.value, JobPhase.RUNNING.value])
# The newest verdicts whose distances are counted, and into how many bins.
_COUNTED = 200
_BINS = 24
# The most verdicts that one step deletes.
_AT_ONCE = 100
_JOB = TypeAdapter(VerificationJob)

_VERDICT = (
    *(each for each in verdicts.c if each.name in MemberVerdict.model_fields),
    *(verdicts.c.job.label("id"), verdicts.c.member.label("member_id"), jobs.c.cause),
    *(members.c.name.label("member_name"), rounds.c.id.label("round_id")),
)


class VerdictStore(StorePart[FleetDatabase]):
    """Part of ``FleetStore``: what a policy's jobs are, what workers get, and what they found."""

    @writes
    def keep_calibration(self, connection: Connection, content: str) -> str:
        """Store a calibration for the workers; returns its digest, by which rules name it."""
        digest = hashlib.sha256(content.encode()).hexdigest()
        added = insert_into(connection, calibrations).values(digest=digest, content=content)
        connection.execute(added.on_conflict_do_nothing(index_elements=[calibrations.c.digest]))
        return digest

    @writes
    def add(self, connection: Connection, made: Sequence[VerificationJob]) -> list[VerificationJob]:
        """Store new jobs, and note what the policy has sampled by them.

        Returns them with their shares of alpha: one controller after another spends it.
        """
        stored = []
        for each in made:
            job = replace(each, alpha_share=_share(connection, each))
            stored.append(job)
            row = _JOB.dump_python(job, mode="json")
            row["member"], row["round"] = row.pop("member_id"), row.pop("round_number")
            row["rule"] = json.dumps(row["rule"])
            connection.execute(jobs.insert().values(row))
            if job.cause is JobCause.OPERATOR:
                continue
            of_lane = (lanes.c.round == job.round_number) & (lanes.c.lane == job.lane)
            sampled = {"sampled_at": job.asked_at, "sampled_batch": job.through_batch}
            counted = update(lanes).where(of_lane)
            connection.execute(counted.values(**sampled, sampled_stored=lanes.c.stored))
        return stored

    @reads
    def newest_batches(self, connection: Connection, round_number: int) -> dict[int, int]:
        """The number of the newest stored batch by lane."""
        newest = select(batches.c.lane, func.max(batches.c.number).label("number"))
        of_round = newest.where(batches.c.round == round_number).group_by(batches.c.lane)
        return {row.lane: row.number for row in connection.execute(of_round)}

    @reads
    def ended_lanes(
        self, connection: Connection, before_round: int, within_s: float
    ) -> list[tuple[FleetRound, Lane]]:
        """The lanes of rounds before that number, ended ``within_s`` ago, with new nonces."""
        late = (rounds.c.number < before_round) & (rounds.c.ended_at > self.clock() - within_s)
        return [
            (round_, lane)
            for round_ in rounds_where(connection, late, _MOST_ENDED)
            for lane in lanes_where(connection, lanes.c.round == round_.number)
            if lane.stored > lane.sampled_stored
        ]

    @reads
    def open_jobs(self, connection: Connection) -> list[VerificationJob]:
        """The jobs that wait or run, oldest first."""
        rows = connection.execute(select(jobs).where(_OPEN).order_by(jobs.c.number))
        return [_job(row) for row in rows]

    @writes
    def wait_again(self, connection: Connection, job_id: str) -> None:
        """Note that a running job waits for another worker."""
        running = (jobs.c.id == job_id) & (jobs.c.state == JobPhase.RUNNING.value)
        connection.execute(update(jobs).where(running).values(state=JobPhase.QUEUED.value))

    @reads
    def free_locks(self, connection: Connection, locks_of_workers: Iterable[str]) -> set[str]:
        """Those of the locks that no process holds."""
        return {name for name in locks_of_workers if not is_held(connection, name)}

    async def begin(self, job_id: str, worker: str) -> VerificationTask | None:
        """Note that ``worker`` begins, and read what it needs. None for a job that has ended."""
        began = {"state": JobPhase.RUNNING.value, "worker": worker, "started_at": self.clock()}
        started = update(jobs).where(jobs.c.id == job_id, _OPEN).values(**began)
        counted = started.values(attempts=jobs.c.attempts + 1).returning(jobs)
        row = await self.database.write(lambda c: c.execute(counted).first())
        return None if row is None else await self.database.read(_task, _job(row))

    @announces
    def finish(
        self,
        connection: Connection,
        job: VerificationJob,
        found: JobFinding,
        state: JobPhase = JobPhase.DONE,
    ) -> MemberVerdict | None:
        """Store the verdict of a complete job, the job's end, and what follows from a conviction.

        None if the job has a verdict already: then nothing is changed.
        """
        now = self.clock()
        ended = update(jobs).where(jobs.c.id == job.id, _OPEN)
        worker = connection.execute(
            ended.values(state=state.value, ended_at=now).returning(jobs.c.worker)
        ).first()
        if worker is None:
            return None
        row = _columns(found) | {"job": job.id, "member": job.member_id, "round": job.round_number}
        row |= {"lane": job.lane, "at": now, "worker": worker[0], "alpha": job.alpha}
        row["unproved"] = _unproved(connection, job.member_id, found.outcome)
        inserted = verdicts.insert().values(row).returning(verdicts.c.number)
        number = connection.execute(inserted).scalar_one()
        of_member = update(members).where(members.c.id == job.member_id)
        connection.execute(of_member.values(verdict=number))
        first = insert_into(connection, verdict_counts).values(outcome=row["outcome"], count=1)
        more = {"count": verdict_counts.c.count + 1}
        connection.execute(
            first.on_conflict_do_update(index_elements=[verdict_counts.c.outcome], set_=more)
        )
        stored = _verdict(connection.execute(_joined().where(verdicts.c.number == number)).one())
        if stored.outcome is VerdictOutcome.FRAUD:
            _convict(connection, job, stored, now)
        limit = job.rule.unproved_share * RECENT
        if stored.outcome is VerdictOutcome.UNPROVED and stored.unproved > limit:
            text = f"unproved in {stored.unproved} of its newest {RECENT} jobs: {stored.reason}"
            _cordon(connection, job.member_id, text)
        return stored

    @reads
    def page(
        self, connection: Connection, member_id: str | None, offset: int, limit: int
    ) -> list[MemberVerdict]:
        """Verdicts about one member or all, the newest first."""
        chosen = _joined().order_by(verdicts.c.number.desc()).offset(offset).limit(limit)
        if member_id is not None:
            chosen = chosen.where(verdicts.c.member == kept(member_id))
        return [_verdict(row) for row in connection.execute(chosen)]

    @reads
    def find(
        self, connection: Connection, job_id: str
    ) -> tuple[MemberVerdict, dict[str, Any] | None] | None:
        """A verdict and its report; None if the job has none, or there is no such job."""
        of_job = _joined(verdicts.c.report).where(verdicts.c.job == kept(job_id))
        row = connection.execute(of_job).first()
        if row is None:
            return None
        # What is not finite is a text.
        report = None if row.report is None else json.loads(row.report, parse_constant=str)
        return _verdict(row), report

    @reads
    def view(self, connection: Connection) -> VerificationView:
        """The newest verdict of each member, and counts: bounded by the number of members."""
        newest = members.c.verdict == verdicts.c.number
        chosen = _joined().where(newest, members.c.removed_at.is_(None))
        last = [_verdict(row) for row in connection.execute(chosen)]
        waiting = select(jobs.c.state, func.count(), func.min(jobs.c.asked_at)).where(_OPEN)
        found = list(connection.execute(waiting.group_by(jobs.c.state)))
        failed = select(func.count()).where(
            jobs.c.state == JobPhase.FAILED.value, jobs.c.ended_at > self.clock() - DAY_S
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

    @reads
    def old(self, connection: Connection, keep_s: float) -> list[str]:
        """Some jobs whose verdict is older than ``keep_s`` and not the newest of its member.

        Jobs of the last day stay, whose shares of alpha are counted.
        """
        now = self.clock()
        newest = select(members.c.id).where(members.c.verdict == verdicts.c.number)
        chosen = select(verdicts.c.job).join(jobs, jobs.c.id == verdicts.c.job)
        chosen = chosen.where(
            verdicts.c.at < now - keep_s, jobs.c.asked_at <= now - DAY_S, ~newest.exists()
        )
        oldest = chosen.order_by(verdicts.c.number).limit(_AT_ONCE)
        return list(connection.execute(oldest).scalars())

    @writes
    def delete(self, connection: Connection, job_ids: Sequence[str]) -> None:
        """Delete verdicts and their jobs; counts stay."""
        connection.execute(delete(verdicts).where(verdicts.c.job.in_(job_ids)))
        connection.execute(delete(jobs).where(jobs.c.id.in_(job_ids)))


def _share(connection: Connection, job: VerificationJob) -> float:
    # The row of the member is locked, so that no other controller spends the same alpha.
    member = select(members.c.id).where(members.c.id == job.member_id)
    connection.execute(member.with_for_update(key_share=True))
    # What another controller's clock, which is ahead, has stored counts too.
    of_day = (jobs.c.member == job.member_id) & (jobs.c.asked_at > job.asked_at - DAY_S)
    sums = select(func.coalesce(func.sum(jobs.c.alpha_share), 0.0), func.count()).where(of_day)
    spent, verified = connection.execute(sums).one()
    return share_of_alpha(spent, verified, job.rule.planned_per_day)


def _owed(
    connection: Connection, job: VerificationJob, lane: NonceLane, rows: Sequence[AnyRow]
) -> Iterable[int]:
    """The nonces from which a job's sample is drawn; ``rows`` are its batches."""
    before = select(func.max(batches.c.last_index)).where(
        batches.c.round == job.round_number,
        batches.c.lane == job.lane,
        batches.c.number <= job.after_batch,
    )
    deleted = select(func.max(deleted_spans.c.end_index)).where(
        deleted_spans.c.round == job.round_number, deleted_spans.c.lane == job.lane
    )
    last, gone = connection.execute(before).scalar(), connection.execute(deleted).scalar()
    start, total = max(0 if last is None else last + 1, gone or 0), sum(row.size for row in rows)
    new = max(row.last_index for row in rows) + 1 - start
    yield from lane.batch(start, min(max(new, 0), 2 * total))
    # A callback that had expired comes late: the nonces around it are of earlier jobs.
    for row in rows:
        if row.first_index < start:
            late = select(batches.c.nonces).where(batches.c.number == row.number)
            for nonce in integers(connection.execute(late).scalar_one()):
                index = lane.index_of(nonce)
                if index is not None and index < start:
                    yield nonce


def _unproved(connection: Connection, member_id: str, outcome: VerdictOutcome) -> int:
    """How many of the newest verdicts about the member are unproved, with a new ``outcome``."""
    known = (verdicts.c.member == member_id) & (
        verdicts.c.outcome != VerdictOutcome.ABSTAINED.value
    )
    newest = select(verdicts.c.outcome).where(known).order_by(verdicts.c.number.desc())
    is_new = outcome is not VerdictOutcome.ABSTAINED
    before = connection.execute(newest.limit(RECENT - is_new)).scalars()
    return [*before, outcome].count(VerdictOutcome.UNPROVED)


def _job(row: AnyRow) -> VerificationJob:
    renamed = {"member_id": row.member, "round_number": row.round, "rule": json.loads(row.rule)}
    return _JOB.validate_python({**row._mapping, **renamed})


def _task(connection: Connection, job: VerificationJob) -> VerificationTask:
    calibration = None
    if (digest := job.rule.calibration) is not None:
        chosen = select(calibrations.c.content).where(calibrations.c.digest == digest)
        calibration = str(connection.execute(chosen).scalar_one())
    (round_,) = rounds_where(connection, rounds.c.number == job.round_number)
    lane = round_.nonces_of(job.lane)
    member, sample = find_member(connection, job.member_id), _sample(connection, job, lane)
    others: tuple[Member, ...] = ()
    if job.rule.by is JudgedBy.MEMBERS:
        # What a cordoned member computes is no witness.
        others = tuple(m for m in active_members(connection) if m.id != member.id)
    return VerificationTask(job, member, round_, sample, calibration, others)


def _sample(connection: Connection, job: VerificationJob, lane: NonceLane) -> StoredSample:
    """The artifacts of a job from the lane's stored batches, the same ones each time.

    They are drawn from all that was owed since the job before: what has not come is missing. Where
    that is more than what came, only so much of it is drawn from, however high a nonce the member
    names.
    """
    of_job = (
        batches.c.round == job.round_number,
        batches.c.lane == job.lane,
        batches.c.number > job.after_batch,
        batches.c.number <= job.through_batch,
        batches.c.count > 0,
    )
    place = (batches.c.number, batches.c.first_index, batches.c.last_index)
    sizes = select(*place, batches.c.count.label("size"), batches.c.kind).where(*of_job)
    rows = connection.execute(sizes.order_by(batches.c.number)).all()
    total = sum(row.size for row in rows)
    nothing = np.empty((0, 0), np.float16)
    if rows and rows[0].kind == BatchKind.ROOTS.value:
        chosen = select(batches.c.body).where(*of_job).order_by(batches.c.number)
        bodies = tuple(json.loads(body) for body in connection.execute(chosen).scalars())
        return StoredSample(np.empty(0, np.int64), nothing, total, bodies)
    if not rows:
        return StoredSample(np.empty(0, np.int64), nothing, 0)
    owed = _owed(connection, job, lane, rows)
    drawn = np.array(draw(owed, job.seed, job.rule.nonces), np.int64)
    nonces, found = [], []
    for number, low, high, *_ in rows:
        within = (drawn >= lane.nonce(low)) & (drawn <= lane.nonce(high))
        if asked := drawn[within].tolist():
            columns = (batches.c.nonces, batches.c.found, batches.c.row_bytes)
            row = connection.execute(select(*columns).where(batches.c.number == number)).one()
            stored = integers(row.nonces)
            places = {nonce: place for place, nonce in enumerate(stored)}
            own = [places[nonce] for nonce in asked if nonce in places]
            nonces += [stored[each] for each in own]
            found.append(vectors(row.found, row.row_bytes)[own])
    all_found = np.concatenate(found) if found else nothing
    missing = len(drawn) - len(nonces)
    return StoredSample(np.array(nonces, np.int64), all_found, total, missing=missing)


def _convict(
    connection: Connection, job: VerificationJob, stored: MemberVerdict, now: float
) -> None:
    rule = job.rule
    if rule.conviction is AfterConviction.CORDON:
        text = f"convicted by verdict {stored.id}: {stored.reason or stored.test}"
        _cordon(connection, job.member_id, text)
    if rule.conviction is AfterConviction.CALLBACK and rule.callback_url is not None:
        body = json.dumps(stored.model_dump(), allow_nan=False)
        DeliveryStore.add(connection, CONVICTED, rule.callback_url, now, body)


def _cordon(connection: Connection, member_id: str, text: str) -> None:
    wish = {"wish": Wish.CORDONED.value, "wish_reason": kept(text)}
    # A member that is drained stays drained.
    active = (members.c.id == member_id) & (members.c.wish == Wish.ACTIVE.value)
    connection.execute(update(members).where(active).values(**wish))


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
    figures = ("distance", "threshold", "log_evidence", "p_value")
    return {
        "outcome": found.outcome.value,
        "reason": kept_if(found.reason),
        "test": found.test,
        "nonces": found.nonces,
        **{name: _finite(getattr(found, name)) for name in figures},
        "seconds": found.seconds,
        "distances": np.array(found.distances, "<f4").tobytes(),
        "report": None if found.report is None else json.dumps(found.report),
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


def _verdict(row: AnyRow) -> MemberVerdict:
    return MemberVerdict.model_validate(row, from_attributes=True)
