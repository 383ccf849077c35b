"""What each member is for the fleet, by what the last looks found. Nothing here asks a member."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proofserve.fleet.records import (
    DesiredState,
    Lane,
    Member,
    MemberLook,
    MemberState,
    MemberStatus,
    Wish,
)
from proofserve.wire.status import DeploymentStatus

# What makes servers equal: the digest of the weights or, without one, the names of the model; and
# the fixed scheme, seq_len and k_dim.
_Kind = tuple[str, str | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Rules:
    """When a member is kept out of the fleet. Times in seconds.

    A member without an answer for ``lost_after_s`` is lost. ``weights_digest`` is the only one that
    the fleet accepts, None for the one that most members have.
    """

    lost_after_s: float = 10.0
    max_clock_offset_s: float = 60.0
    weights_digest: str | None = None


@dataclass(frozen=True, slots=True)
class MemberCondition:
    """A member, its state with the reason, and what it said of itself, None if it never did.

    ``answered``: it answered the last look, so that ``status`` is what it does now.
    """

    member: Member
    state: MemberState
    reason: str | None
    status: MemberStatus | None
    answered: bool

    @property
    def is_ready(self) -> bool:
        return self.state is MemberState.READY

    @property
    def generates(self) -> bool:
        """Whether it proves a round now, of this fleet or another one."""
        return self.answered and self.status is not None and self.status.generates

    @property
    def rate(self) -> float | None:
        """Nonces per second that it proves now; None while it proves no round, or is silent."""
        if not self.generates or self.status is None or self.status.stats is None:
            return None
        return self.status.stats.recent_nonces_per_second

    @property
    def deployment(self) -> DeploymentStatus | None:
        return None if self.status is None else self.status.deployment


def conditions(
    members: Sequence[Member],
    desired: DesiredState,
    lanes: Sequence[Lane],
    rules: Rules,
    now: float,
) -> tuple[MemberCondition, ...]:
    """The condition of each of ``members`` at the time ``now``.

    ``lanes`` holds all lanes of the desired round, and those of earlier rounds that are still open.
    """
    lanes_of: dict[str, list[Lane]] = {member.id: [] for member in members}
    for lane in lanes:
        lanes_of.setdefault(lane.member_id, []).append(lane)
    kind = _common_kind(members, desired, lanes_of, rules)
    found = []
    for member in members:
        look = member.seen
        status = look.status if look else None
        foreign = foreign_round(status, desired, lanes_of[member.id]) if status else None
        state, reason = _state(member, foreign, kind, rules, now)
        answered = look is not None and look.answered
        found.append(MemberCondition(member, state, reason, status, answered))
    return tuple(found)


def foreign_round(status: MemberStatus, desired: DesiredState, own: Sequence[Lane]) -> str | None:
    """Why the round that the member proves is not the fleet's; None if it is, or proves none.

    ``own`` are the lanes that were given to this member.
    """
    if not status.generates or lane_of_member(status, desired, own) is not None:
        return None
    if any(lane.member_round_id is None and lane.ended_at is None for lane in own):
        # The answer of a start of ours was lost, and the fleet has gone on to another round.
        return None
    config = status.config
    about = f"block {config.block_hash[:40]}, key {config.public_key[:40]}" if config else "unknown"
    return (
        f"it proves a round that is not of this fleet ({about}): stop it there,"
        " or take the member out of the other fleet"
    )


def lane_of_member(status: MemberStatus, desired: DesiredState, own: Sequence[Lane]) -> Lane | None:
    """The lane of ``own`` whose round the member has configured.

    A lane whose start was never answered is known by its numbers, while the member proves it: an
    ended round may be an earlier one with the same block and key.
    """
    for lane in own:
        if lane.member_round_id is not None and lane.member_round_id == status.round_id:
            return lane
    round_ = desired.round
    if round_ is None or not status.generates:
        return None
    for lane in own:
        unknown = lane.round_id == round_.id and lane.member_round_id is None
        if unknown and status.has(round_.spec, round_.nonces_of(lane.lane)):
            return lane
    return None


def _state(
    member: Member, foreign: str | None, kind: _Kind | None, rules: Rules, now: float
) -> tuple[MemberState, str | None]:
    look = member.seen
    if look is None:
        return MemberState.JOINING, "not looked at yet"
    if not look.answered and look.status is None:
        return MemberState.JOINING, f"has not answered yet: {look.error}"
    silent_s = now - look.at
    if not look.answered and silent_s > rules.lost_after_s:
        return MemberState.LOST, f"no answer for {silent_s:.0f} s: {look.error}"
    if why := _refusal(look, kind, rules) or foreign:
        return MemberState.REFUSED, why
    if look.status is not None and (why := _stall(look.status)):
        return MemberState.LOST, why
    wished = MemberState.READY if member.wish is Wish.ACTIVE else MemberState(member.wish)
    return wished, member.wish_reason


def _stall(status: MemberStatus) -> str | None:
    """Why the member's engine cannot prove, though the member answers; None if it can."""
    for number, core in enumerate(status.liveness):
        if core.stalled:
            default = f"it has work and has not stepped for {core.waited_s:.0f} s"
            return f"engine core {number}: {core.reason or default}"
    return f"its engine: {status.engine_error}" if status.engine_error else None


def _refusal(look: MemberLook, kind: _Kind | None, rules: Rules) -> str | None:
    """Why the member cannot work beside the others; None if it can."""
    if look.answered and look.error is not None:
        return look.error
    if look.status is None:
        return "it did not say what is deployed"
    theirs, digest = _kind(look.status.deployment), look.status.deployment.weights_digest
    if rules.weights_digest not in (None, digest):
        return f"its weights have the digest {digest}, the fleet is for {rules.weights_digest}"
    names = ("weights", "fixed scheme", "fixed seq_len", "fixed k_dim")
    for name, their, common in zip(names, theirs, kind or theirs, strict=True):
        if their != common:
            return f"its {name}: {their}; that of most members: {common}"
    return _wrong_clock(look.clock_offset_s, rules)


def _wrong_clock(offset_s: float | None, rules: Rules) -> str | None:
    if offset_s is None:
        return "its answers have no Date header, so its clock cannot be compared"
    if abs(offset_s) <= rules.max_clock_offset_s:
        return None
    return (
        f"its clock is {offset_s:+.0f} s from the fleet's, the limit is"
        f" {rules.max_clock_offset_s:g} s: set its clock"
    )


def _kind(deployment: DeploymentStatus) -> _Kind:
    weights = deployment.weights_digest or f"the model {', '.join(deployment.models)}"
    return weights, deployment.scheme, deployment.seq_len, deployment.k_dim


def _common_kind(
    members: Sequence[Member],
    desired: DesiredState,
    lanes_of: Mapping[str, Sequence[Lane]],
    rules: Rules,
) -> _Kind | None:
    """The kind that most have; of two equally frequent ones that of the oldest member.

    Only members with a lane of the desired round count, if there are any: however many others join,
    the round goes on.
    """
    round_id = desired.round.id if desired.round else None
    by_age = sorted(members, key=lambda each: (each.added_at, each.id))
    deployed = [(e.id, e.seen.status.deployment) for e in by_age if e.seen and e.seen.status]
    proving = [
        (member_id, deployment)
        for member_id, deployment in deployed
        if any(e.round_id == round_id and e.ended_at is None for e in lanes_of[member_id])
    ]
    voters = [deployment for _, deployment in proving or deployed]
    counted = Counter(
        _kind(each) for each in voters if rules.weights_digest in (None, each.weights_digest)
    )
    return next((kind for kind, _ in counted.most_common(1)), None)
