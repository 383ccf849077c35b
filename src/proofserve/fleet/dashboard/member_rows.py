"""A member as a row of the page, with what an operator may do with it."""

from collections.abc import Iterator

from proofserve.dashboard.records import ActionField, ActionOffer, Fact, Level, MemberRow
from proofserve.fleet import reasons
from proofserve.fleet.dashboard.member_history import MemberHistory, rate_of
from proofserve.fleet.dashboard.verification_panels import last_verdict
from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.members.member_status import MemberStatus
from proofserve.fleet.records import Member, MemberSource, MemberState, Wish
from proofserve.fleet.watch import Overview
from proofserve.wire.paths import FLEET

_LEVELS = {
    MemberState.LOST: Level.BAD,
    MemberState.REFUSED: Level.BAD,
    MemberState.JOINING: Level.WARNING,
    MemberState.CORDONED: Level.IDLE,
    MemberState.DRAINING: Level.IDLE,
}
_REASON = ActionField(name="reason", label="Reason, for other operators", required=True)


def member_row(
    overview: Overview, condition: MemberCondition, history: MemberHistory, verifies: bool
) -> MemberRow:
    """``verifies``: an operator may ask for a verdict, because the fleet has a policy."""
    member, status = condition.member, condition.status
    reason = reasons.member_reason(overview, condition)
    verdict = overview.verification.last.get(member.id)
    engine, outbox = (status.engine, status.outbox) if status else (None, None)
    deployed = condition.deployment
    return MemberRow(
        id=member.id,
        name=member.name,
        state=_state(condition),
        level=_level(overview, condition, reason),
        reason=reason or "",
        version=deployed.versions.get("proofserve", "") if deployed else "",
        model=", ".join(deployed.models) if deployed else "",
        stalled_s=max((core.waited_s for core in status.liveness), default=None)
        if status
        else None,
        rate=history.rate(member.id),
        chat_wait_s=engine.longest_chat_wait_s if engine else None,
        held_back_by=_holds_back(status) if condition.answered else "",
        outbox_age_s=outbox.oldest_pending_s if outbox else None,
        verdict=None if verdict is None else last_verdict(verdict),
        facts=tuple(_facts(overview, condition)),
        actions=tuple(_actions(member, verifies)),
    )


def _state(condition: MemberCondition) -> str:
    if condition.is_ready and condition.status is not None and condition.status.generates:
        return "proving"
    return condition.state.value


def _level(overview: Overview, condition: MemberCondition, reason: str | None) -> Level:
    if overview.verification.convicted(condition.member.id):
        return Level.BAD
    if not condition.is_ready:
        return _LEVELS[condition.state]
    if reason is not None:
        return Level.WARNING
    return Level.GOOD if rate_of(condition) is not None else Level.IDLE


def _holds_back(status: MemberStatus | None) -> str:
    return status.paused_reason or "" if status is not None and status.generates else ""


def _facts(overview: Overview, condition: MemberCondition) -> Iterator[Fact]:
    member, status = condition.member, condition.status
    yield Fact(label="Address", value=member.url)
    yield Fact(label="Member by", value=member.source.value)
    if (lane := overview.newest.get(member.id)) is not None:
        ended = " (ended)" if lane.lane.ended_at is not None else ""
        yield Fact(label="Lane of the round", value=f"{lane.lane.lane}{ended}")
        yield Fact(label="Stored of the lane", value=lane.stored)
    if member.seen is not None and member.seen.clock_offset_s is not None:
        yield Fact(label="Its clock is ahead by", value=member.seen.clock_offset_s, unit="s")
    if status is None:
        return
    if (engine := status.engine) is not None:
        yield Fact(label="Forwards of proofs", value=engine.forwards)
        yield Fact(label="Last forward", value=engine.last_forward_s, unit="s")
        yield Fact(label="Chat requests in the engine", value=engine.unfinished_requests)
        yield Fact(label="KV blocks free", value=engine.free_blocks)
    if (outbox := status.outbox) is not None:
        yield Fact(label="Callbacks waiting", value=outbox.pending)
        yield Fact(label="Callbacks expired", value=outbox.expired)
    if (deployed := condition.deployment) is not None:
        yield Fact(label="vLLM", value=deployed.versions.get("vllm", "unknown"))
        yield Fact(label="Digest of the weights", value=deployed.weights_digest or "unknown")


def _actions(member: Member, verifies: bool) -> Iterator[ActionOffer]:
    path = f"{FLEET}/members/{member.id}"
    if verifies:
        yield _verify(member, path)
    if member.wish is not Wish.ACTIVE:
        yield ActionOffer(
            id="uncordon",
            label="Take back",
            path=f"{path}/uncordon",
            confirmation=f"{member.name} takes part in rounds and jobs again.",
        )
    else:
        yield ActionOffer(
            id="cordon",
            label="Cordon",
            path=f"{path}/cordon",
            confirmation=f"{member.name} goes on with its lane and gets nothing new.",
            fields=(_REASON,),
        )
    if member.wish is not Wish.DRAINING:
        yield ActionOffer(
            id="drain",
            label="Drain",
            path=f"{path}/drain",
            confirmation=f"The lane of {member.name} ends. What it has proved is still delivered.",
            fields=(_REASON,),
            dangerous=True,
        )
    if member.source is MemberSource.JOINED:
        yield ActionOffer(
            id="remove",
            label="Remove",
            path=f"{path}/remove",
            confirmation=f"{member.name} is forgotten until it joins again. Its results stay.",
            fields=(_REASON,),
            dangerous=True,
        )


def _verify(member: Member, path: str) -> ActionOffer:
    return ActionOffer(
        id="verify",
        label="Verify now",
        path=f"{path}/verify",
        confirmation=f"A worker recomputes a sample of what {member.name} has proved.",
    )
