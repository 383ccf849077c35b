"""What each member is for the fleet, by what the last looks found. Nothing here asks a member."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proofserve.fleet.members.member_status import MemberDeployment, MemberStatus, read_status
from proofserve.fleet.records import Desired, Lane, Member, MemberState, Seen, Wish

# What makes servers equal: the digest of the weights or, without one, the names of the model; and
# the fixed scheme, seq_len and k_dim.
_Kind = tuple[str, str | None, int | None, int | None]


_WISHED: Mapping[Wish, MemberState] = {
    Wish.ACTIVE: MemberState.READY,
    Wish.CORDONED: MemberState.CORDONED,
    Wish.DRAINING: MemberState.DRAINING,
}


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
    def deployment(self) -> MemberDeployment | None:
        return None if self.status is None else self.status.deployment


class StatusReader:
    """What members said of themselves; each look is checked once, however often it is asked for."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Seen, MemberStatus | None]] = {}

    def statuses(self, members: Sequence[Member]) -> dict[str, MemberStatus | None]:
        """The last status of each member by id; None for one that never gave any."""
        before, self._known = self._known, {}
        for member in members:
            if (seen := member.seen) is not None:
                known = before.get(member.id)
                same = known is not None and known[0] is seen
                self._known[member.id] = known if same and known else (seen, _status(seen))
        return {
            member.id: self._known[member.id][1] if member.id in self._known else None
            for member in members
        }


def conditions(
    members: Sequence[Member],
    statuses: Mapping[str, MemberStatus | None],
    desired: Desired,
    lanes: Sequence[Lane],
    rules: Rules,
    now: float,
) -> tuple[MemberCondition, ...]:
    """The condition of each of ``members`` at the time ``now``.

    ``statuses`` are those of a ``StatusReader``. ``lanes`` are those of the desired round, and all
    that were not ended.
    """
    lanes_of: dict[str, list[Lane]] = {member.id: [] for member in members}
    for lane in lanes:
        lanes_of.setdefault(lane.member_id, []).append(lane)
    kind = _common_kind(_voters(members, statuses, desired, lanes_of), rules)
    found = []
    for member in members:
        status, own = statuses[member.id], lanes_of[member.id]
        foreign = None if status is None else foreign_round(status, desired, own)
        state, reason = _state(member, status, foreign, kind, rules, now)
        answered = member.seen is not None and member.seen.answered
        found.append(MemberCondition(member, state, reason, status, answered))
    return tuple(found)


def foreign_round(status: MemberStatus, desired: Desired, own: Sequence[Lane]) -> str | None:
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


def lane_of_member(status: MemberStatus, desired: Desired, own: Sequence[Lane]) -> Lane | None:
    """The lane of ``own`` whose round the member has configured.

    A lane whose start was never answered is known by its numbers, while the member proves it: an
    ended round may be an earlier one with the same block and key.
    """
    for lane in own:
        if lane.member_round_id is not None and lane.member_round_id == status.round_id:
            return lane
    round_ = desired.round
    if round_ is None or status.config is None or not status.generates:
        return None
    for lane in own:
        unknown = lane.round_id == round_.id and lane.member_round_id is None
        if unknown and status.config.is_of(round_.spec, round_.nonces_of(lane.lane)):
            return lane
    return None


def _status(seen: Seen) -> MemberStatus | None:
    if seen.status is None:
        return None
    try:
        return read_status(seen.status)
    except ValueError:
        # A controller of another version stored it; the next look replaces it.
        return None


def _state(
    member: Member,
    status: MemberStatus | None,
    foreign: str | None,
    kind: _Kind | None,
    rules: Rules,
    now: float,
) -> tuple[MemberState, str | None]:
    if absent := _absence(member.seen, status, rules, now):
        return absent
    if why := _refusal(member.seen, status, kind, rules) or foreign:
        return MemberState.REFUSED, why
    if why := _stall(status):
        return MemberState.LOST, why
    return _WISHED[member.wish], member.wish_reason


def _absence(
    seen: Seen | None, status: MemberStatus | None, rules: Rules, now: float
) -> tuple[MemberState, str] | None:
    """The state of a member that does not answer, None for one that does.

    One that was silent for a moment only is as it was before.
    """
    if seen is None:
        return MemberState.JOINING, "not looked at yet"
    if seen.answered:
        return None
    if status is None:
        return MemberState.JOINING, f"has not answered yet: {seen.error}"
    silent_s = now - seen.at
    if silent_s <= rules.lost_after_s:
        return None
    return MemberState.LOST, f"no answer for {silent_s:.0f} s: {seen.error}"


def _stall(status: MemberStatus | None) -> str | None:
    """Why the member's engine cannot prove, though the member answers; None if it can."""
    if status is None:
        return None
    for number, core in enumerate(status.liveness):
        if core.stalled:
            default = f"it has work and has not stepped for {core.waited_s:.0f} s"
            return f"engine core {number}: {core.reason or default}"
    return f"its engine: {status.engine_error}" if status.engine_error else None


def _refusal(
    seen: Seen | None, status: MemberStatus | None, kind: _Kind | None, rules: Rules
) -> str | None:
    """Why the member cannot work beside the others; None if it can."""
    if seen is None or (seen.answered and seen.error is not None):
        return seen.error if seen else None
    if status is None or status.deployment is None:
        return "it did not say what is deployed"
    theirs, digest = _kind(status.deployment), status.deployment.weights_digest
    if rules.weights_digest not in (None, digest):
        return f"its weights have the digest {digest}, the fleet is for {rules.weights_digest}"
    if kind is not None and theirs != kind:
        return _difference(theirs, kind)
    return _wrong_clock(seen.clock_offset_s, rules)


def _wrong_clock(offset_s: float | None, rules: Rules) -> str | None:
    if offset_s is None:
        return "its answers have no Date header, so its clock cannot be compared"
    if abs(offset_s) <= rules.max_clock_offset_s:
        return None
    return (
        f"its clock is {offset_s:+.0f} s from the fleet's, the limit is"
        f" {rules.max_clock_offset_s:g} s: set its clock"
    )


def _kind(deployment: MemberDeployment) -> _Kind:
    weights = deployment.weights_digest or f"the model {', '.join(deployment.models)}"
    return weights, deployment.scheme, deployment.seq_len, deployment.k_dim


def _difference(theirs: _Kind, kind: _Kind) -> str:
    names = ("weights", "fixed scheme", "fixed seq_len", "fixed k_dim")
    for name, their, common in zip(names, theirs, kind, strict=True):
        if their != common:
            return f"its {name}: {their}; that of most members: {common}"
    raise AssertionError("the two kinds are equal")


def _voters(
    members: Sequence[Member],
    statuses: Mapping[str, MemberStatus | None],
    desired: Desired,
    lanes_of: Mapping[str, Sequence[Lane]],
) -> list[MemberDeployment]:
    """The deployments that decide what the fleet serves, of the members by age.

    Only members with a lane of the desired round, if there are any: however many others join, the
    round goes on.
    """
    round_id = desired.round.id if desired.round else None
    deployed = []
    for member in sorted(members, key=lambda each: (each.added_at, each.id)):
        status = statuses[member.id]
        if status is not None and status.deployment is not None:
            deployed.append((member.id, status.deployment))
    proving = [
        deployment
        for member_id, deployment in deployed
        if any(e.round_id == round_id and e.ended_at is None for e in lanes_of[member_id])
    ]
    return proving or [deployment for _, deployment in deployed]


def _common_kind(voters: Sequence[MemberDeployment], rules: Rules) -> _Kind | None:
    """The kind that most have; of two equally frequent ones the first."""
    kinds = [_kind(each) for each in voters if rules.weights_digest in (None, each.weights_digest)]
    # A Counter keeps the order in which it met them, and max takes the first of equals.
    counted = Counter(kinds)
    return max(counted, key=lambda each: counted[each]) if counted else None
