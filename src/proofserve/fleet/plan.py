"""What to do with each member, by what is desired and what was seen: one pure function."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from proofserve.fleet.conditions import MemberCondition, lane_of_member
from proofserve.fleet.records import DesiredState, FleetRound, Lane, MemberState, MemberStatus
from proofserve.rounds.state import State

# A lane without an answer of its start call is given up so many seconds after it was given: no
# call takes longer, so the member has no start of it before it any more.
START_LOST_S = 30.0
# Each lane that a member lost in a round doubles the pause before its next one, up to the longest.
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 300.0
_MOST_DOUBLINGS = 16


@dataclass(frozen=True, slots=True)
class StartLane:
    """Give the member a lane and start its round."""

    member_id: str


@dataclass(frozen=True, slots=True)
class ContinueLane:
    """Let the member's stopped round of the distance protocol go on; its lane stays."""

    member_id: str
    lane: Lane


@dataclass(frozen=True, slots=True)
class AdoptLane:
    """The member proves this lane: note its id of the round, which a start call does not tell."""

    member_id: str
    lane: Lane
    member_round_id: str


@dataclass(frozen=True, slots=True)
class StopMember:
    member_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EndLane:
    """The member will prove no more of this lane. What it still delivers is stored."""

    member_id: str
    lane: Lane
    reason: str


Action = StartLane | ContinueLane | AdoptLane | StopMember | EndLane


def plan(
    desired: DesiredState,
    found: Sequence[MemberCondition],
    lanes: Sequence[Lane],
    held: Collection[str],
    now: float,
) -> list[Action]:
    """The actions that bring the members closer to ``desired``; none if nothing is to be done.

    ``lanes`` holds all lanes of the desired round, and those of earlier rounds that are still open.
    Nothing is done with members in ``held`` (a call to them is still running, or failed a moment
    ago), nor with those that did not answer the last look: what they do is unknown, and they keep
    their lane.
    """
    actions: list[Action] = []
    lanes_of: dict[str, list[Lane]] = {}
    for lane in lanes:
        lanes_of.setdefault(lane.member_id, []).append(lane)
    for each in found:
        if each.status is None or not each.answered or each.member.id in held:
            continue
        own = lanes_of.get(each.member.id, [])
        actions += _MemberPlan(desired, each, each.status, own, now).actions()
    return _within_lanes_left(actions, desired.round, lanes)


@dataclass(frozen=True, slots=True)
class _MemberPlan:
    desired: DesiredState
    condition: MemberCondition
    status: MemberStatus
    own: Sequence[Lane]
    now: float

    def actions(self) -> list[Action]:
        current = self._current()
        proved = lane_of_member(self.status, self.desired, self.own)
        actions = [*self._ends_of_others(current, proved), *self._adoption(proved)]
        if self.status.generates and (reason := self._reason_to_stop(current, proved)):
            actions.append(StopMember(self.member_id, reason))
        elif current is not None and self.desired.state is State.GENERATING:
            actions += self._keep(current) if proved is current else self._give_up(current)
        elif self._may_start():
            actions.append(StartLane(self.member_id))
        return actions

    @property
    def member_id(self) -> str:
        return self.condition.member.id

    @property
    def _round_id(self) -> str | None:
        return self.desired.round.id if self.desired.round else None

    def _current(self) -> Lane | None:
        """The member's lane of the desired round, if it was not ended."""
        for lane in self.own:
            if lane.round_id == self._round_id and lane.ended_at is None:
                return lane
        return None

    def _ends_of_others(self, current: Lane | None, proved: Lane | None) -> list[Action]:
        """The lanes of earlier rounds that the member has stopped proving."""
        return [
            EndLane(self.member_id, lane, "its round was ended")
            for lane in self.own
            if lane.ended_at is None and lane is not current
            if not (self.status.generates and proved in (lane, None))
        ]

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

    def _adoption(self, proved: Lane | None) -> Iterator[Action]:
        """Also of a lane that is about to end: its results belong to the member's round."""
        round_id = self.status.round_id
        if proved is None or proved.ended_at is not None or round_id is None:
            return
        if proved.member_round_id is None:
            yield AdoptLane(self.member_id, proved, round_id)

    def _keep(self, current: Lane) -> list[Action]:
        """What becomes of the lane of the desired round that the member has configured."""
        if self.status.generates:
            return []
        if self.condition.state is MemberState.READY and self._may_go_on():
            return [ContinueLane(self.member_id, current)]
        default = self.condition.reason or "the member was stopped by another client"
        return [EndLane(self.member_id, current, self.status.error or default)]

    def _give_up(self, current: Lane) -> list[Action]:
        """What becomes of a lane that the member does not have configured."""
        if current.member_round_id is not None:
            why = "the member was restarted, or was given another round"
        elif self.now - current.given_at >= START_LOST_S:
            why = "after its start call it was not seen to prove the lane"
        else:
            return []
        return [EndLane(self.member_id, current, why)]

    def _may_go_on(self) -> bool:
        """A round of the distance protocol goes on in its lane, unless a fault ended it."""
        spec = self.desired.round.spec if self.desired.round else None
        return spec is not None and spec.target is not None and self.status.error is None

    def _may_start(self) -> bool:
        if self.desired.state is not State.GENERATING or self.desired.round is None:
            return False
        if self.condition.state is not MemberState.READY or self.status.generates:
            return False
        ends = [
            lane.ended_at
            for lane in self.own
            if lane.round_id == self._round_id and lane.ended_at is not None
        ]
        if not ends:
            return True
        pause_s = _FIRST_PAUSE_S * 2.0 ** min(len(ends) - 1, _MOST_DOUBLINGS)
        return self.now >= max(ends) + min(pause_s, _LONGEST_PAUSE_S)


def _within_lanes_left(
    actions: Sequence[Action], round_: FleetRound | None, lanes: Sequence[Lane]
) -> list[Action]:
    """``actions`` with no more starts than the round has lanes left."""
    if round_ is None:
        return list(actions)
    left = lanes_left(round_, lanes)
    kept: list[Action] = []
    for action in actions:
        if isinstance(action, StartLane):
            left -= 1
            if left < 0:
                continue
        kept.append(action)
    return kept


def lanes_left(round_: FleetRound, lanes: Sequence[Lane]) -> int:
    """How many lanes of ``round_`` were not given yet; ``lanes`` holds all that were."""
    return round_.lanes - sum(lane.round_id == round_.id for lane in lanes)
