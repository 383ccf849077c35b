"""Why a round makes no progress, and why a member takes no part: sentences for operators."""

from proofserve.fleet import summary
from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.members.member_status import MemberOutbox
from proofserve.fleet.reconciling.plan import lanes_left
from proofserve.fleet.records import MemberState
from proofserve.fleet.watch import Overview
from proofserve.rounds.state import State


def paused_reason(overview: Overview) -> str | None:
    """Why a running round makes no progress; None if at least one member does."""
    if overview.desired.state is not State.GENERATING or overview.desired.round is None:
        return None
    if reason := overview.why_not_ready:
        return reason
    running = summary.proving(overview)
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
    if lane is not None and lane.lane.ended_at is None:
        return None
    if not lanes_left(desired.round, overview.lanes):
        return f"no lane is left of the round's {desired.round.lanes}"
    return f"its last lane ended: {lane.lane.end_reason}" if lane else None


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
