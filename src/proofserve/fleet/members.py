"""What each member is for the fleet, and what to do with it: pure functions of looks and rows.

Nothing here asks a member.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from proofserve.fleet.records import (
    DesiredState,
    FleetRound,
    Lane,
    Member,
    MemberLook,
    MemberState,
    MemberStatus,
    Wish,
)
from proofserve.rounds.state import State
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
    lanes_of = _by_member(lanes)
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


def _by_member(lanes: Sequence[Lane]) -> Mapping[str, Sequence[Lane]]:
    """The lanes of each member; none for any other id."""
    lanes_of = defaultdict[str, list[Lane]](list)
    for lane in lanes:
        lanes_of[lane.member_id].append(lane)
    return lanes_of


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


# -- what is done with members ---------------------------------------------------------------------

# A lane without an answer of its start call is given up so many seconds after it was given: no
# call takes longer, so the member has no start of it before it any more.
START_LOST_S = 30.0
# Each lane that a member lost in a round doubles the pause before its next one, up to the longest.
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 300.0
_MOST_DOUBLINGS = 16


class MemberCall(StrEnum):
    START = "start"
    """Give the member a lane and start its round."""
    CONTINUE = "continue"
    """Let the member's stopped round of the distance protocol go on; its lane stays."""
    STOP = "stop"
    """End the round that the member proves."""


@dataclass(frozen=True, slots=True)
class MemberChange:
    """What is to be done with a member: rows of its lanes, and one call to it, ``why`` for the log.

    ``ended``: lanes of which it will prove no more, and why; what it still delivers is stored.
    ``adopted``: the lane that it proves, and its id of the round, which a start call does not tell.
    """

    member_id: str
    ended: Mapping[Lane, str]
    adopted: Mapping[Lane, str]
    call: MemberCall | None = None
    why: str = ""


def plan(
    desired: DesiredState,
    found: Sequence[MemberCondition],
    lanes: Sequence[Lane],
    held: Collection[str],
    now: float,
) -> list[MemberChange]:
    """The changes that bring the members closer to ``desired``; none if nothing is to be done.

    ``lanes`` holds all lanes of the desired round, and those of earlier rounds that are still open.
    Nothing is done with members in ``held`` (a call to them is still running, or failed a moment
    ago), nor with those that did not answer the last look: what they do is unknown, and they keep
    their lane.
    """
    lanes_of = _by_member(lanes)
    left = lanes_left(desired.round, lanes) if desired.round else 0
    changes = []
    for each in found:
        if each.status is None or not each.answered or each.member.id in held:
            continue
        own = lanes_of[each.member.id]
        change = _MemberPlan(desired, each, each.status, own, now).change()
        if change.call is MemberCall.START:
            left -= 1
            if left < 0:
                change = replace(change, call=None)
        if change.ended or change.adopted or change.call:
            changes.append(change)
    return changes


@dataclass(frozen=True, slots=True)
class _MemberPlan:
    desired: DesiredState
    condition: MemberCondition
    status: MemberStatus
    own: Sequence[Lane]
    now: float

    def change(self) -> MemberChange:
        # The member's lane of the desired round, if it was not ended, and the one that it has.
        current = next((each for each in self._of_round if each.ended_at is None), None)
        proved = lane_of_member(self.status, self.desired, self.own)
        # Lanes of earlier rounds that the member has stopped proving.
        ended = {
            lane: "its round was ended"
            for lane in self.own
            if lane.ended_at is None and lane is not current
            if not (self.status.generates and proved in (lane, None))
        }
        call, why = None, ""
        if self.status.generates and (reason := self._reason_to_stop(current, proved)):
            call, why = MemberCall.STOP, reason
        elif current is not None and self.desired.state is State.GENERATING:
            if proved is current and self._goes_on():
                call, why = MemberCall.CONTINUE, f"lane {current.lane}"
            elif reason := self._reason_to_end(current, proved):
                ended[current] = reason
        elif self._may_start():
            call = MemberCall.START
        return MemberChange(self.condition.member.id, ended, self._adopted(proved), call, why)

    @property
    def _of_round(self) -> list[Lane]:
        """The member's lanes of the desired round."""
        round_id = self.desired.round.id if self.desired.round else None
        return [each for each in self.own if each.round_id == round_id]

    def _reason_to_stop(self, current: Lane | None, proved: Lane | None) -> str | None:
        """Why the round that the member proves must end; None if it may go on."""
        if proved is None:
            lost_start = any(
                lane.member_round_id is None and lane.ended_at is None and lane is not current
                for lane in self.own
            )
            return "it proves an earlier round of the fleet" if lost_start else None
        if proved is not current:
            return "it proves an earlier round, or a lane that was ended"
        if self.desired.state is not State.GENERATING:
            return "the round was stopped"
        if self.condition.state in (MemberState.DRAINING, MemberState.REFUSED):
            return f"{self.condition.state}: {self.condition.reason}"
        return None

    def _adopted(self, proved: Lane | None) -> dict[Lane, str]:
        """Also of a lane that is about to end: its results belong to the member's round."""
        round_id = self.status.round_id
        if proved is None or proved.ended_at is not None or round_id is None:
            return {}
        return {proved: round_id} if proved.member_round_id is None else {}

    def _goes_on(self) -> bool:
        """Whether the stopped round goes on: of the distance protocol, and no fault ended it."""
        spec = self.desired.round.spec if self.desired.round else None
        if self.status.generates or self.condition.state is not MemberState.READY:
            return False
        return spec is not None and spec.target is not None and self.status.error is None

    def _reason_to_end(self, current: Lane, proved: Lane | None) -> str | None:
        """Why the member will prove no more of its lane of the desired round; None if it may."""
        if proved is current:
            default = self.condition.reason or "the member was stopped by another client"
            return None if self.status.generates else self.status.error or default
        if current.member_round_id is not None:
            return "the member was restarted, or was given another round"
        if self.now - current.given_at >= START_LOST_S:
            return "after its start call it was not seen to prove the lane"
        return None

    def _may_start(self) -> bool:
        if self.desired.state is not State.GENERATING or self.desired.round is None:
            return False
        if self.condition.state is not MemberState.READY or self.status.generates:
            return False
        ends = [each.ended_at for each in self._of_round if each.ended_at is not None]
        if not ends:
            return True
        pause_s = _FIRST_PAUSE_S * 2.0 ** min(len(ends) - 1, _MOST_DOUBLINGS)
        return self.now >= max(ends) + min(pause_s, _LONGEST_PAUSE_S)


def lanes_left(round_: FleetRound, lanes: Sequence[Lane]) -> int:
    """How many lanes of ``round_`` were not given yet; ``lanes`` holds all that were."""
    return round_.lanes - sum(lane.round_id == round_.id for lane in lanes)
