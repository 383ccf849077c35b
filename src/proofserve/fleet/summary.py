"""Counts of a fleet's round: what is stored, and what its members say of themselves."""

from collections.abc import Mapping
from dataclasses import dataclass

from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.records import LaneProgress
from proofserve.fleet.watch import Overview
from proofserve.rounds.state import State
from proofserve.rounds.status import LaneUse, Stats

# Of the members' own recent rates.
_WINDOW_S = 30.0


@dataclass(frozen=True, slots=True)
class LaneCounts:
    """Nonces with a result, and those without one, as the member of the lane counts them."""

    processed: int = 0
    failed: int = 0


# By round id and lane.
Counted = Mapping[tuple[str, int], LaneCounts]


def counts_of(overview: Overview, before: Counted) -> Counted:
    """What the members of the desired round's lanes have counted.

    A member that was restarted without its round counts anew: then ``before`` stays.
    """
    members = {each.member.id: each for each in overview.members}
    counted = {}
    for each in overview.view.lanes:
        lane = each.lane
        place = (lane.round_id, lane.lane)
        known = before.get(place, LaneCounts())
        if stats := _stats(members.get(lane.member_id), each):
            known = LaneCounts(
                max(known.processed, stats.processed), max(known.failed, stats.failed)
            )
        counted[place] = known
    return counted


def _stats(member: MemberCondition | None, progress: LaneProgress) -> LaneCounts | None:
    status = member.status if member else None
    if status is None or status.stats is None or progress.lane.member_round_id is None:
        return None
    if status.round_id != progress.lane.member_round_id:
        return None
    return LaneCounts(status.stats.total_processed, status.stats.failed)


def processed(progress: LaneProgress, overview: Overview, counted: Counted) -> int:
    """Nonces of a lane with a result.

    Of artifacts only those that the fleet has stored count. In a round of the distance protocol
    most nonces leave nothing to store: there the member's own count is used.
    """
    round_ = overview.desired.round
    if round_ is None or round_.spec.target is None:
        return progress.stored
    lane = progress.lane
    known = counted.get((lane.round_id, lane.lane), LaneCounts())
    return max(progress.stored, known.processed)


def lane_use(overview: Overview, counted: Counted) -> LaneUse | None:
    round_ = overview.desired.round
    if round_ is None or not round_.lanes:
        return None
    used = {each.lane.lane: processed(each, overview, counted) for each in overview.view.lanes}
    return LaneUse(round_.lanes, used)


def round_stats(overview: Overview, counted: Counted, now: float) -> Stats | None:
    """The counters of the desired round, None without one. ``now`` in wall-clock seconds."""
    round_ = overview.desired.round
    if round_ is None:
        return None
    done = sum(processed(each, overview, counted) for each in overview.view.lanes)
    elapsed_s = max(0.0, (round_.ended_at or now) - round_.opened_at)
    theirs = [e.status.stats for e in proving(overview) if e.status and e.status.stats]
    return Stats(
        processed=done,
        found=sum(each.stored for each in overview.view.lanes),
        failed=sum(each.failed for each in counted.values()),
        elapsed_s=elapsed_s,
        rate=done / elapsed_s if elapsed_s else 0.0,
        recent_rate=sum(each.recent_nonces_per_second for each in theirs),
        window_s=_WINDOW_S,
        deferred_calls=sum(each.deferred_calls for each in theirs),
        deferred_s=sum(each.deferred_s for each in theirs),
        faults=sum(each.faults for each in theirs),
    )


def proving(overview: Overview) -> list[MemberCondition]:
    """The members that generate the desired round's lane that they have."""
    if overview.desired.state is not State.GENERATING:
        return []
    own = {e.lane.member_id: e.lane for e in overview.view.lanes if e.lane.ended_at is None}
    return [
        each
        for each in overview.members
        if each.answered and each.status is not None and each.status.generates
        if (lane := own.get(each.member.id)) is not None
        if lane.member_round_id == each.status.round_id
    ]
