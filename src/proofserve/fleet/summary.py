"""A fleet's round in figures, and in sentences for operators why it makes no progress."""

from collections.abc import Mapping

from proofserve.fleet.member_status import MemberOutbox
from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.plan import lanes_left
from proofserve.fleet.records import Lane, MemberState
from proofserve.fleet.watch import Overview
from proofserve.rounds.state import State
from proofserve.rounds.status import LaneUse, Stats

# Of the members' own recent rates.
_WINDOW_S = 30.0

# Nonces with a result, and those without one, as the member of a lane counts them: by the id of the
# round and the number of the lane.
MemberCounts = Mapping[tuple[str, int], tuple[int, int]]


def counts_of(overview: Overview, before: MemberCounts) -> MemberCounts:
    """What the members of the desired round's lanes have counted.

    A member that was restarted without its round counts anew: then ``before`` stays.
    """
    statuses = {each.member.id: each.status for each in overview.members}
    counted = {}
    for lane in overview.view.lanes:
        place = (lane.round_id, lane.lane)
        done, failed = before.get(place, (0, 0))
        status = statuses.get(lane.member_id)
        stats = status.stats if status else None
        if status and stats and status.round_id and status.round_id == lane.member_round_id:
            done, failed = max(done, stats.total_processed), max(failed, stats.failed)
        counted[place] = (done, failed)
    return counted


def processed(lane: Lane, overview: Overview, counted: MemberCounts) -> int:
    """Nonces of a lane with a result.

    Of artifacts only those that the fleet has stored count. In a round of the distance protocol
    most nonces leave nothing to store: there the member's own count is used.
    """
    round_ = overview.desired.round
    if round_ is None or round_.spec.target is None:
        return lane.stored
    done, _ = counted.get((lane.round_id, lane.lane), (0, 0))
    return max(lane.stored, done)


def lane_use(overview: Overview, counted: MemberCounts) -> LaneUse | None:
    round_ = overview.desired.round
    if round_ is None or not round_.lanes:
        return None
    used = {each.lane: processed(each, overview, counted) for each in overview.view.lanes}
    return LaneUse(round_.lanes, used)


def round_stats(overview: Overview, counted: MemberCounts, now: float) -> Stats | None:
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
        failed=sum(failed for _, failed in counted.values()),
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
    own = {e.member_id: e for e in overview.view.lanes if e.ended_at is None}
    return [
        each
        for each in overview.members
        if each.generates and each.status is not None
        if (lane := own.get(each.member.id)) is not None
        if lane.member_round_id == each.status.round_id
    ]


def paused_reason(overview: Overview) -> str | None:
    """Why a running round makes no progress; None if at least one member does."""
    if overview.desired.state is not State.GENERATING or overview.desired.round is None:
        return None
    if reason := overview.why_not_ready:
        return reason
    running = proving(overview)
    reasons = [f"{e.member.name}: {e.status.paused_reason}" for e in running if e.status]
    if running and any(e.status and e.status.paused_reason is None for e in running):
        return None
    if reasons:
        return "; ".join(reasons[:3])
    if not lanes_left(overview.desired.round, overview.lanes):
        return (
            f"all {overview.desired.round.lanes} lanes of the round were given to members that"
            " prove them no more: start the next round with more --lanes"
        )
    return "no member has started its lane yet"


def member_reason(overview: Overview, condition: MemberCondition) -> str | None:
    """What an operator should know of a member: why it is kept out, or takes no part."""
    status = condition.status
    if condition.state is MemberState.DRAINING and status is not None and status.outbox is not None:
        pending = status.outbox.pending
        left = f"{pending} callbacks to deliver" if pending else "nothing is left"
        return f"{condition.reason} ({left})"
    if condition.reason or status is None:
        return condition.reason
    return _of_lane(overview, condition) or _of_outbox(status.outbox) or status.paused_reason


def _of_lane(overview: Overview, condition: MemberCondition) -> str | None:
    """Why a ready member has no lane of the running round."""
    lane, desired = overview.newest.get(condition.member.id), overview.desired
    if desired.state is not State.GENERATING or desired.round is None:
        return None
    if lane is not None and lane.ended_at is None:
        return None
    if not lanes_left(desired.round, overview.lanes):
        return f"no lane is left of the round's {desired.round.lanes}"
    return f"its last lane ended: {lane.end_reason}" if lane else None


def _of_outbox(outbox: MemberOutbox | None) -> str | None:
    """Why its results do not arrive."""
    if outbox is None:
        return None
    if outbox.last_error and outbox.pending:
        return f"its callbacks fail: {outbox.last_error}"
    if not outbox.expired:
        return None
    return (
        f"{outbox.expired} of its callbacks have expired: run `proofserve outbox retry --expired`"
        " there, and give it POC_CALLBACK_MAX_RETRIES=0"
    )
