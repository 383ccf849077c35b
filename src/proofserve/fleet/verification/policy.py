"""The operator's policy of verification, and which samples it wants now."""

import secrets
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.records import FleetRound, LaneProgress
from proofserve.fleet.verification.records import JobCause, VerificationJob, VerificationRule
from proofserve.fleet.watch import Overview


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


def is_due(progress: LaneProgress, rule: VerificationRule, now: float) -> bool:
    """Whether a sample of the lane is due: enough is new, and the time has come."""
    fresh = progress.stored - progress.sampled_stored
    if fresh < max(rule.nonces, rule.every_nonces or 0):
        return False
    if rule.every_s is None or progress.sampled_at is None:
        return True
    return now - progress.sampled_at >= rule.every_s


def due(
    overview: Overview, policy: VerificationPolicy, busy: set[tuple[int, int]]
) -> Iterator[tuple[LaneProgress, VerificationRule]]:
    """The lanes of the desired round of which a sample is due. ``busy`` have an open job."""
    round_ = overview.desired.round
    if round_ is None or round_.spec.target is not None:
        # Distances are judged by /validate: they have no vectors.
        return
    members = {each.member.id: each for each in overview.members}
    for progress in overview.view.lanes:
        condition = members.get(progress.lane.member_id)
        rule = policy.rule_of(condition) if condition else None
        if rule is None or (round_.number, progress.lane.lane) in busy:
            continue
        if is_due(progress, rule, overview.view.at):
            yield progress, rule


def job_of(
    overview: Overview,
    round_: FleetRound,
    progress: LaneProgress,
    rule: VerificationRule,
    cause: JobCause,
    through_batch: int,
) -> VerificationJob:
    """A sample of what is new in the lane, or for an operator of all that is stored."""
    digest, model = served(overview)
    return VerificationJob(
        id=uuid.uuid4().hex,
        member_id=progress.lane.member_id,
        round_number=round_.number,
        lane=progress.lane.lane,
        cause=cause,
        queue=queue_name(digest, model),
        rule=rule,
        weights_digest=digest,
        model=model,
        seed=secrets.token_hex(16),
        after_batch=progress.sampled_batch if cause is JobCause.POLICY else 0,
        through_batch=through_batch,
        asked_at=overview.view.at,
    )


def served(overview: Overview) -> tuple[str | None, str | None]:
    """The digest and the name of what the fleet serves, whatever one member says of itself."""
    if overview.deployment is None:
        return None, None
    info = overview.deployment.engine_info
    return info.facts.weights_digest, info.model_names[0] if info.model_names else None


def queue_name(weights_digest: str | None, model: str | None) -> str:
    """The queue that workers with a checkpoint read: by its weights, else by the model's name."""
    return f"weights:{weights_digest}" if weights_digest else f"model:{model or ''}"
