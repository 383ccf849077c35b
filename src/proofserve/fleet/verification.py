"""Verification of members: the operator's policy, the samples that are due, and their jobs."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy.exc import SQLAlchemyError

from proofserve.fleet.job_queues import JobProgress, JobSender
from proofserve.fleet.members import MemberCondition
from proofserve.fleet.records import FleetRound, Lane, StoreUnavailable
from proofserve.fleet.sql.verdicts import VerdictStore
from proofserve.fleet.verification_records import (
    JobCause,
    JobFinding,
    JobPhase,
    JudgedBy,
    VerdictOutcome,
    VerificationJob,
    VerificationRule,
)
from proofserve.fleet.watch import FleetWatch, Overview
from proofserve.protocol.nonces import fresh_seed
from proofserve.rounds.errors import Refusal, Refused
from proofserve.rounds.tasks import woken

_logger = logging.getLogger(__name__)

PASS_EVERY_S = 1.0
# So long after the end of a round that was replaced its lanes are still sampled, seconds.
_LATE_S = 600.0
# The lock that a worker holds while it lives; DBOS knows the worker by the same name.
WORKER_LOCK = "worker-"
# A restart of PostgreSQL frees all locks, and each worker takes its own again within two seconds.
_GONE_S = 3.0
# Members still deliver after the end of a round: what is new is sampled once nothing came for so
# long. Seconds.
_QUIET_S = 10.0
# Most members say their weights, so that the queues by names are empty.
_BY_NAME = "model:"
# Any worker judges members by each other.
MEMBERS_QUEUE = "members"
# With DBOS's own default, a second, a small job would mostly wait. Each question takes some
# milliseconds of a core, also while the worker computes. Seconds.
_OFTEN_S, _SELDOM_S = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class VerificationPolicy:
    """The rule of each member: by its name or URL, else by its model, else ``default``.

    Without a ``default`` other members are not verified. ``calibrations`` are the contents of the
    files that rules name, by their digests.
    """

    default: VerificationRule | None = None
    members: Mapping[str, VerificationRule] = field(default_factory=dict)
    models: Mapping[str, VerificationRule] = field(default_factory=dict)
    calibrations: Mapping[str, str] = field(default_factory=dict)

    def rule_of(self, condition: MemberCondition) -> VerificationRule | None:
        member, deployed = condition.member, condition.deployment
        named = [self.members.get(name) for name in (member.name, member.url)]
        named += [self.models.get(name) for name in (deployed.models if deployed else ())]
        return next((rule for rule in named if rule is not None), self.default)


def is_due(
    lane: Lane, rule: VerificationRule, now: float, round_ended_at: float | None = None
) -> bool:
    """Whether a sample of the lane is due: enough is new, and the time has come.

    What is new when the round has ended is sampled whatever the rule's times: a member that knows
    them could else prove honestly only when a sample is near.
    """
    fresh = lane.stored - lane.sampled_stored
    if fresh < rule.nonces:
        return False
    if rule.by is JudgedBy.MEMBERS and round_ended_at is None:
        # Members that generate compute nothing else meanwhile.
        return False
    if round_ended_at is not None:
        last = max(round_ended_at, lane.last_stored_at or round_ended_at)
        if now - last >= _QUIET_S:
            return True
    if fresh < (rule.every_nonces or 0):
        return False
    if rule.every_s is None or lane.sampled_at is None:
        return True
    return now - lane.sampled_at >= rule.every_s


def due(
    overview: Overview,
    policy: VerificationPolicy,
    ended: Sequence[tuple[FleetRound, Lane]],
    busy: Collection[tuple[int, int]],
) -> Iterator[tuple[FleetRound, Lane, VerificationRule]]:
    """The lanes of the desired round and in ``ended`` of which a sample is due, by which rule.

    ``busy`` are the lanes with an open job, by the number of their round.
    """
    desired = overview.desired.round
    of_desired = [(desired, each) for each in overview.view.lanes] if desired else []
    for round_, lane in (*of_desired, *ended):
        # Distances are judged by /validate: they have no vectors.
        if round_.spec.target is not None or (round_.number, lane.lane) in busy:
            continue
        condition = overview.by_id.get(lane.member_id)
        rule = policy.rule_of(condition) if condition else None
        if rule and is_due(lane, rule, overview.view.at, round_.ended_at):
            yield round_, lane, rule


def job_of(
    round_: FleetRound,
    lane: Lane,
    rule: VerificationRule,
    cause: JobCause,
    through_batch: int,
    now: float,
) -> VerificationJob:
    """A sample of what is new in the lane, or for an operator of all that is stored."""
    by_weights = queue_name(lane.weights_digest, lane.model)
    queue = MEMBERS_QUEUE if rule.by is JudgedBy.MEMBERS else by_weights
    return VerificationJob(
        id=uuid.uuid4().hex,
        member_id=lane.member_id,
        round_number=round_.number,
        lane=lane.lane,
        cause=cause,
        queue=queue,
        rule=rule,
        weights_digest=lane.weights_digest,
        model=lane.model,
        seed=fresh_seed(),
        after_batch=lane.sampled_batch if cause is JobCause.POLICY else 0,
        through_batch=through_batch,
        asked_at=now,
    )


def queue_name(weights_digest: str | None, model: str | None) -> str:
    """The queue that workers with a checkpoint read: by its weights, else by the model's name."""
    return f"weights:{weights_digest}" if weights_digest else f"{_BY_NAME}{model or ''}"


def poll_s(queue: str) -> float:
    """How often a worker asks ``queue``, in seconds."""
    return _SELDOM_S if queue.startswith(_BY_NAME) else _OFTEN_S


@dataclass(eq=False, repr=False)
class VerificationControl:
    """Makes jobs by the policy, sends them, and gives those of dead workers to others.

    Run one at a time, by the leader. The rows are the truth: whatever is interrupted, the next pass
    repairs. ``open_sender`` connects to the queues; it is called in a thread. Verdicts are deleted
    after ``keep_s`` seconds, 0 for never; the newest one of each member stays. A worker whose lock
    is free for ``gone_s`` seconds has ended.
    """

    _store: VerdictStore
    _watch: FleetWatch
    _policy: VerificationPolicy
    _open_sender: Callable[[], JobSender]
    _keep_s: float = 0.0
    _gone_s: float = _GONE_S
    # When a pass first found a worker's lock free, by the monotonic clock.
    _free_since: dict[str, float] = field(default_factory=dict, init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def wake(self) -> None:
        """Begin the next pass now."""
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled."""
        sender: JobSender | None = None
        try:
            while True:
                self._wake.clear()
                try:
                    if sender is None:
                        for content in self._policy.calibrations.values():
                            await self._store.keep_calibration(content)
                        sender = await asyncio.to_thread(self._open_sender)
                    await self.step(sender)
                except (StoreUnavailable, SQLAlchemyError) as error:
                    _logger.warning("members are not verified: %s", error)
                except Exception:
                    _logger.exception("a pass over verification jobs failed")
                await woken(self._wake, PASS_EVERY_S)
        finally:
            if sender is not None:
                await asyncio.to_thread(sender.close)

    async def ask(self, member_id: str) -> VerificationJob:
        """Have all that a member has stored of the newest round sampled now.

        Raises Refused (NOTHING_TO_VERIFY), and StoreUnavailable.
        """
        overview = self._watch.current
        condition = overview.by_id.get(member_id)
        rule = self._policy.rule_of(condition) if condition else None
        if rule is None:
            text = "the policy has no rule for this member: add one to its file"
            raise Refused(Refusal.NOTHING_TO_VERIFY, text)
        round_, lane = overview.desired.round, overview.newest.get(member_id)
        if round_ is None or lane is None or not lane.stored or round_.spec.target is not None:
            text = "the member has no stored vectors of the fleet's newest round: start a round"
            raise Refused(Refusal.NOTHING_TO_VERIFY, text)
        through = (await self._store.newest_batches(round_.number))[lane.lane]
        job = job_of(round_, lane, rule, JobCause.OPERATOR, through, overview.view.at)
        (stored,) = await self._store.add([job])
        self.wake()
        return stored

    async def step(self, sender: JobSender) -> None:
        """One pass. Raises StoreUnavailable and the errors of SQLAlchemy."""
        open_jobs = await self._store.open_jobs()
        made = await self._due(open_jobs)
        if made:
            await self._store.add(made)
        progress = await asyncio.to_thread(sender.progress, [job.id for job in open_jobs])
        for job in [*open_jobs, *made]:
            if job.id not in progress:
                await asyncio.to_thread(sender.send, job)
            elif (error := progress[job.id].error) is not None:
                await self._give_up(job, error)
        await self._replace_dead_workers(sender, open_jobs, progress)
        if self._keep_s and (old := await self._store.old(self._keep_s)):
            await asyncio.to_thread(sender.forget, old)
            await self._store.delete(old)

    async def _due(self, open_jobs: Sequence[VerificationJob]) -> list[VerificationJob]:
        overview = self._watch.current
        desired = overview.desired.round
        ended = await self._store.ended_lanes(desired.number, _LATE_S) if desired else []
        busy = {(job.round_number, job.lane) for job in open_jobs}
        found = list(due(overview, self._policy, ended, busy))
        numbers = {round_.number for round_, _, _ in found}
        newest = {number: await self._store.newest_batches(number) for number in numbers}
        cause, now = JobCause.POLICY, overview.view.at
        return [
            job_of(round_, lane, rule, cause, newest[round_.number].get(lane.lane, 0), now)
            for round_, lane, rule in found
        ]

    async def _replace_dead_workers(
        self,
        sender: JobSender,
        open_jobs: Sequence[VerificationJob],
        progress: Mapping[str, JobProgress],
    ) -> None:
        at_work = {each.worker for each in progress.values() if each.worker}
        free, now = await self._store.free_locks(at_work) if at_work else set(), time.monotonic()
        self._free_since = {worker: self._free_since.get(worker, now) for worker in free}
        ended = {each for each, since in self._free_since.items() if now - since >= self._gone_s}
        for job in open_jobs:
            worker = progress[job.id].worker if job.id in progress else None
            if worker not in ended:
                continue
            if job.attempts >= job.rule.attempts:
                await asyncio.to_thread(sender.cancel, job)
                await self._give_up(job, f"{job.attempts} workers ended while they computed it")
                continue
            _logger.warning("worker %s is gone: job %s goes to another one", worker, job.id)
            await self._store.wait_again(job.id)
            await asyncio.to_thread(sender.send_again, job)

    async def _give_up(self, job: VerificationJob, error: str) -> None:
        """A job that cannot be computed is an abstention; no change if it has its verdict."""
        seconds = max(0.0, time.time() - job.asked_at)
        found = JobFinding(VerdictOutcome.ABSTAINED, seconds, reason=f"the job failed: {error}")
        if await self._store.finish(job, found, JobPhase.FAILED) is not None:
            _logger.warning("job %s failed: %s", job.id, error)
