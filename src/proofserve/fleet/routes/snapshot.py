"""All that an operator looks at, in one bounded JSON object: the worst members first."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from proofserve.fleet import reasons, summary
from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.records import MemberState
from proofserve.fleet.summary import Counted
from proofserve.fleet.verification_records import JobPhase, VerdictOutcome
from proofserve.fleet.watch import Overview

# The most members of one page.
MOST_OF_PAGE = 500
_WORST_FIRST = (
    MemberState.LOST,
    MemberState.REFUSED,
    MemberState.JOINING,
    MemberState.DRAINING,
    MemberState.CORDONED,
    MemberState.READY,
)


def snapshot(
    overview: Overview, counted: Counted, now: float, offset: int, limit: int
) -> dict[str, Any]:
    """The fleet, its round, and ``limit`` members from the ``offset``-th worst on.

    Durations in seconds, rates in nonces per second, ages by the fleet's own clock.
    """
    ordered = sorted(overview.members, key=lambda each: _badness(overview, each))
    page = ordered[offset : offset + limit]
    return {
        "at": now,
        "fleet": _fleet(overview, counted, now),
        "of_members": len(ordered),
        "offset": offset,
        "members": [member_record(overview, counted, each, now) for each in page],
        "verification": _verification(overview, now),
    }


def member_record(
    overview: Overview, counted: Counted, condition: MemberCondition, now: float
) -> dict[str, Any]:
    member, status = condition.member, condition.status
    lane = overview.newest.get(member.id)
    engine, outbox = (status.engine, status.outbox) if status else (None, None)
    deployed = condition.deployment
    return {
        "id": member.id,
        "name": member.name,
        "url": member.url,
        "source": member.source,
        "state": condition.state,
        "reason": reasons.member_reason(overview, condition),
        "wish": member.wish,
        "wish_reason": member.wish_reason,
        "version": deployed.versions.get("proofserve") if deployed else None,
        "vllm_version": deployed.versions.get("vllm") if deployed else None,
        "model": deployed.models[0] if deployed and deployed.models else None,
        "weights_digest": deployed.weights_digest if deployed else None,
        "lane": lane.lane.lane if lane and lane.lane.ended_at is None else None,
        "nonces_per_second": _rate(condition),
        "processed": summary.processed(lane, overview, counted) if lane else 0,
        "stored": lane.stored if lane else 0,
        "steps": sum(core.steps for core in status.liveness) if status else None,
        "stalled_s": member.seen.stalled_s if member.seen else None,
        "last_step_s": max((core.waited_s for core in status.liveness), default=None)
        if status
        else None,
        "last_forward_s": engine.last_forward_s if engine else None,
        "chat_wait_s": engine.longest_chat_wait_s if engine else None,
        "paused_reason": status.paused_reason if status else None,
        "outbox_pending": outbox.pending if outbox else None,
        "outbox_age_s": outbox.oldest_pending_s if outbox else None,
        "clock_offset_s": member.seen.clock_offset_s if member.seen else None,
        "seen_s": max(0.0, now - member.seen.at) if member.seen else None,
        "verdict": _last_verdict(overview, member.id),
    }


def _last_verdict(overview: Overview, member_id: str) -> dict[str, Any] | None:
    if (found := overview.verification.last.get(member_id)) is None:
        return None
    names = ("id", "outcome", "reason", "test", "nonces", "distance", "threshold", "at")
    return {name: getattr(found, name) for name in names}


def _verification(overview: Overview, now: float) -> dict[str, Any]:
    seen = overview.verification
    oldest = seen.oldest_asked_at
    shown = (JobPhase.QUEUED, JobPhase.RUNNING, JobPhase.FAILED)
    return {
        "jobs": {state.value: seen.jobs.get(state, 0) for state in shown},
        "oldest_job_s": None if oldest is None else max(0.0, now - oldest),
        "verdicts": {each.value: seen.outcomes.get(each, 0) for each in VerdictOutcome},
        "distances": None if seen.distances is None else asdict(seen.distances),
    }


def _fleet(overview: Overview, counted: Counted, now: float) -> dict[str, Any]:
    desired = overview.desired
    round_, stats = desired.round, summary.round_stats(overview, counted, now)
    states = Counter(each.state for each in overview.members)
    return {
        "state": desired.state,
        "round_id": round_.id if round_ else None,
        "block_hash": round_.spec.work.block.hash if round_ else None,
        "block_height": round_.spec.work.block.height if round_ else None,
        "public_key": round_.spec.work.public_key if round_ else None,
        "scheme": round_.spec.work.scheme.name if round_ else None,
        "started_at": round_.opened_at if round_ else None,
        "ended_at": round_.ended_at if round_ else None,
        "lanes_used": len(overview.view.lanes),
        "lanes": round_.lanes if round_ else 0,
        "paused_reason": reasons.paused_reason(overview),
        "members": {state.value: states.get(state, 0) for state in MemberState},
        "processed": stats.processed if stats else 0,
        "found": stats.found if stats else 0,
        "failed": stats.failed if stats else 0,
        "nonces_per_second": stats.recent_rate if stats else 0.0,
        "elapsed_s": stats.elapsed_s if stats else 0.0,
    }


def _rate(condition: MemberCondition) -> float:
    status = condition.status
    if not condition.answered or status is None or not status.generates or status.stats is None:
        return 0.0
    return status.stats.recent_nonces_per_second


def _badness(overview: Overview, condition: MemberCondition) -> tuple[bool, int, bool, str]:
    """Sorts the worst first: convicted ones, by state, then those with a reason, then by name."""
    member = condition.member
    honest = not overview.verification.convicted(member.id)
    has_reason = reasons.member_reason(overview, condition) is not None
    return honest, _WORST_FIRST.index(condition.state), not has_reason, member.name
