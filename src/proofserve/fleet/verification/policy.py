"""The operator's policy of verification, and which samples it wants now."""

import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.records import FleetRound, LaneProgress, Served
from proofserve.fleet.verification_records import JobCause, VerificationJob, VerificationRule
from proofserve.fleet.watch import Overview
from proofserve.protocol.nonces import fresh_seed

# Members still deliver after the end of a round: what is new is sampled once nothing came for so
# long. Seconds.
_QUIET_S = 10.0
# Most members say their weights, so that the queues by names are empty.
_BY_NAME = "model:"
# With DBOS's own default, a second, a small job would mostly wait. Each question takes some
# milliseconds of a core, also while the worker computes. Seconds.
_OFTEN_S, _SELDOM_S = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class SampledLane:
    """A lane with its round, and the rule by which it is sampled."""

    round: FleetRound
    progress: LaneProgress
    rule: VerificationRule

    @property
    def lane(self) -> int:
        return self.progress.lane.lane


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
        for name in (member.name, member.url):
            if name in self.members:
                return self.members[name]
        for name in deployed.models if deployed else ():
            if name in self.models:
                return self.models[name]
        return self.default


def is_due(
    progress: LaneProgress, rule: VerificationRule, now: float, round_ended_at: float | None = None
) -> bool:
    """Whether a sample of the lane is due: enough is new, and the time has come.

    What is new when the round has ended is sampled whatever the rule's times: a member that knows
    them could else prove honestly only when a sample is near.
    """
    fresh = progress.stored - progress.sampled_stored
    if fresh < rule.nonces:
        return False
    if round_ended_at is not None:
        last = max(round_ended_at, progress.last_stored_at or round_ended_at)
        if now - last >= _QUIET_S:
            return True
    if fresh < (rule.every_nonces or 0):
        return False
    if rule.every_s is None or progress.sampled_at is None:
        return True
    return now - progress.sampled_at >= rule.every_s


def due(
    overview: Overview,
    policy: VerificationPolicy,
    ended: Sequence[tuple[FleetRound, LaneProgress]],
    busy: Collection[tuple[int, int]],
) -> Iterator[SampledLane]:
    """The lanes of the desired round, and of those in ``ended``, of which a sample is due.

    ``busy`` are the lanes with an open job, by the number of their round.
    """
    members = {each.member.id: each for each in overview.members}
    desired = overview.desired.round
    of_desired = [(desired, each) for each in overview.view.lanes] if desired else []
    for round_, progress in (*of_desired, *ended):
        # Distances are judged by /validate: they have no vectors.
        if round_.spec.target is not None or (round_.number, progress.lane.lane) in busy:
            continue
        condition = members.get(progress.lane.member_id)
        rule = policy.rule_of(condition) if condition else None
        if rule and is_due(progress, rule, overview.view.at, round_.ended_at):
            yield SampledLane(round_, progress, rule)


def job_of(
    overview: Overview, sampled: SampledLane, cause: JobCause, through_batch: int
) -> VerificationJob:
    """A sample of what is new in the lane, or for an operator of all that is stored."""
    progress = sampled.progress
    # A lane of an older database does not say what was served.
    served = progress.lane.served if progress.lane.served != Served() else overview.served
    return VerificationJob(
        id=uuid.uuid4().hex,
        member_id=progress.lane.member_id,
        round_number=sampled.round.number,
        lane=sampled.lane,
        cause=cause,
        queue=queue_name(served.weights_digest, served.model),
        rule=sampled.rule,
        weights_digest=served.weights_digest,
        model=served.model,
        seed=fresh_seed(),
        after_batch=progress.sampled_batch if cause is JobCause.POLICY else 0,
        through_batch=through_batch,
        asked_at=overview.view.at,
    )


def queue_name(weights_digest: str | None, model: str | None) -> str:
    """The queue that workers with a checkpoint read: by its weights, else by the model's name."""
    return f"weights:{weights_digest}" if weights_digest else f"{_BY_NAME}{model or ''}"


def poll_s(queue: str) -> float:
    """How often a worker asks ``queue``, in seconds."""
    return _SELDOM_S if queue.startswith(_BY_NAME) else _OFTEN_S
