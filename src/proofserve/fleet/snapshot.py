"""What an operator looks at: the answers of all routes, and the page of a report.

Durations in seconds, rates in nonces per second, times in seconds since the epoch.
"""

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal

from proofserve.api.response_models import ResponseModel
from proofserve.fleet.members import MemberCondition
from proofserve.fleet.records import MemberSource, MemberState, Wish
from proofserve.fleet.verification_records import (
    RECENT,
    DistanceCounts,
    JobPhase,
    MemberVerdict,
    VerdictOutcome,
)
from proofserve.fleet.watch import Overview
from proofserve.rounds.state import State
from proofserve.web import rendered

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

_MOST_DISTANCES: Final = 1000
STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}th,td{padding:.2rem .8rem;border-bottom:1px solid #ccc;"
    "text-align:left}.fraud{color:#b42318}.honest{color:#1a7f37}"
    "@media(prefers-color-scheme:dark){body{background:#16181d;color:#e6e6e6}"
    ".fraud{color:#ff7b72}.honest{color:#3fb950}}"
)
# The page has no script, and one style of its own.
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
PAGE_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class LastVerdictAnswer(ResponseModel):
    """The newest verdict about a member."""

    id: str
    outcome: VerdictOutcome
    reason: str | None
    test: str | None
    nonces: int
    distance: float | None
    threshold: float | None
    at: float
    unproved: int


class MemberAnswer(ResponseModel):
    """One member. What it has not said yet is null; ``reason`` is for operators."""

    id: str
    name: str
    url: str
    source: MemberSource
    state: MemberState
    reason: str | None
    wish: Wish
    wish_reason: str | None
    version: str | None
    vllm_version: str | None
    model: str | None
    weights_digest: str | None
    lane: int | None
    nonces_per_second: float
    processed: int
    stored: int
    steps: int | None
    stalled_s: float | None
    last_step_s: float | None
    last_forward_s: float | None
    chat_wait_s: float | None
    paused_reason: str | None
    outbox_pending: int | None
    outbox_age_s: float | None
    clock_offset_s: float | None
    seen_s: float | None
    verdict: LastVerdictAnswer | None


class MembersPage(ResponseModel):
    """Members from the ``offset``-th worst on, of ``of_members``."""

    members: list[MemberAnswer]
    of_members: int
    offset: int


class FleetAnswer(ResponseModel):
    """The fleet and its round: ``members`` by state, ``lanes_used`` of its ``lanes``."""

    state: State
    round_id: str | None
    block_hash: str | None
    block_height: int | None
    public_key: str | None
    scheme: str | None
    started_at: float | None
    ended_at: float | None
    lanes_used: int
    lanes: int
    paused_reason: str | None
    members: dict[str, int]
    processed: int
    found: int
    failed: int
    nonces_per_second: float
    elapsed_s: float


class VerificationAnswer(ResponseModel):
    """Jobs by state, failed ones of the last day; all verdicts by outcome; newest distances."""

    jobs: dict[str, int]
    oldest_job_s: float | None
    verdicts: dict[str, int]
    distances: DistanceCounts | None


class SnapshotAnswer(MembersPage):
    """All that an operator looks at, as of ``at``."""

    at: float
    fleet: FleetAnswer
    verification: VerificationAnswer


class VerdictPage(ResponseModel):
    """Verdicts from the ``offset``-th newest on."""

    verdicts: list[MemberVerdict]
    offset: int


class VerdictReportAnswer(MemberVerdict):
    """A verdict and the report of ``proofserve verify --json``; null for an abstention."""

    report: dict[str, Any] | None


class VerificationJobAnswer(ResponseModel):
    """A verification that waits for a worker; its verdict will have the same id."""

    id: str
    member_id: str
    member_name: str
    queue: str


class JoinAnswer(ResponseModel):
    """What the server is for the fleet; a reason if it takes no part."""

    id: str
    state: MemberState
    reason: str | None


class RemovedAnswer(ResponseModel):
    id: str
    name: str
    removed: Literal[True]


def snapshot(overview: Overview, now: float, offset: int, limit: int) -> SnapshotAnswer:
    """The fleet, its round, and ``limit`` members from the ``offset``-th worst on.

    Ages are by the fleet's own clock.
    """
    ordered = sorted(overview.members, key=lambda each: _badness(overview, each))
    page, seen = ordered[offset : offset + limit], overview.verification
    oldest, shown = seen.oldest_asked_at, (JobPhase.QUEUED, JobPhase.RUNNING, JobPhase.FAILED)
    return SnapshotAnswer(
        at=now,
        fleet=_fleet(overview, now),
        of_members=len(ordered),
        offset=offset,
        members=[member_answer(overview, each, now) for each in page],
        verification=VerificationAnswer(
            jobs={state.value: seen.jobs.get(state, 0) for state in shown},
            oldest_job_s=None if oldest is None else max(0.0, now - oldest),
            verdicts={each.value: seen.outcomes.get(each, 0) for each in VerdictOutcome},
            distances=seen.distances,
        ),
    )


def member_answer(overview: Overview, condition: MemberCondition, now: float) -> MemberAnswer:
    member, status = condition.member, condition.status
    lane, last = overview.newest.get(member.id), overview.verification.last.get(member.id)
    verdict = LastVerdictAnswer.model_validate(last, from_attributes=True) if last else None
    engine, outbox = (status.engine, status.outbox) if status else (None, None)
    deployed, cores = condition.deployment, status.liveness if status else ()
    stalls = (core.waited_s for core in cores if core.stalled)
    return MemberAnswer(
        id=member.id,
        name=member.name,
        url=member.url,
        source=member.source,
        state=condition.state,
        reason=overview.reason_of(condition),
        wish=member.wish,
        wish_reason=member.wish_reason,
        version=deployed.versions.get("proofserve") if deployed else None,
        vllm_version=deployed.versions.get("vllm") if deployed else None,
        model=deployed.models[0] if deployed and deployed.models else None,
        weights_digest=deployed.weights_digest if deployed else None,
        lane=lane.lane if lane and lane.ended_at is None else None,
        nonces_per_second=condition.rate or 0.0,
        processed=overview.processed(lane) if lane else 0,
        stored=lane.stored if lane else 0,
        steps=sum(core.steps for core in cores) if status else None,
        stalled_s=max(stalls, default=0.0) if status else None,
        last_step_s=max((core.waited_s for core in cores), default=None),
        last_forward_s=engine.last_forward_s if engine else None,
        chat_wait_s=engine.longest_chat_wait_s if engine else None,
        paused_reason=status.paused_reason if status else None,
        outbox_pending=outbox.pending if outbox else None,
        outbox_age_s=outbox.oldest_pending_s if outbox else None,
        clock_offset_s=member.seen.clock_offset_s if member.seen else None,
        seen_s=max(0.0, now - member.seen.at) if member.seen else None,
        verdict=verdict,
    )


def _fleet(overview: Overview, now: float) -> FleetAnswer:
    desired = overview.desired
    round_, stats = desired.round, overview.round_stats(now)
    work = round_.spec.work if round_ else None
    states = Counter(each.state for each in overview.members)
    return FleetAnswer(
        state=desired.state,
        round_id=round_.id if round_ else None,
        block_hash=work.block.hash if work else None,
        block_height=work.block.height if work else None,
        public_key=work.public_key if work else None,
        scheme=work.scheme.name if work else None,
        started_at=round_.opened_at if round_ else None,
        ended_at=round_.ended_at if round_ else None,
        lanes_used=len(overview.view.lanes),
        lanes=round_.lanes if round_ else 0,
        paused_reason=overview.paused_reason,
        members={state.value: states.get(state, 0) for state in MemberState},
        processed=stats.total_processed if stats else 0,
        found=stats.total_found if stats else 0,
        failed=stats.failed if stats else 0,
        nonces_per_second=stats.recent_nonces_per_second if stats else 0.0,
        elapsed_s=stats.elapsed_s if stats else 0.0,
    )


def _badness(overview: Overview, condition: MemberCondition) -> tuple[bool, int, bool, str]:
    """Sorts the worst first: convicted ones, by state, then those with a reason, then by name."""
    member = condition.member
    honest = not overview.verification.convicted(member.id)
    has_reason = overview.reason_of(condition) is not None
    return honest, _WORST_FIRST.index(condition.state), not has_reason, member.name


def report_page(verdict: MemberVerdict, report: Mapping[str, Any] | None) -> str:
    """A verdict as a page for people. ``report`` is None for an abstention."""
    content = report or {}
    facts: dict[str, object] = {
        "Member": f"{verdict.member_name} ({verdict.member_id})",
        "Round": verdict.round_id,
        "Lane": verdict.lane,
        "Asked for by": verdict.cause,
        "Reason": verdict.reason,
        "Test": verdict.test,
        "Nonces recomputed": verdict.nonces,
        f"Unproved among its newest {RECENT}": verdict.unproved,
        "Median distance": verdict.distance,
        "Threshold of honest distances": verdict.threshold,
        "Logarithm of the evidence": verdict.log_evidence,
        "p-value": verdict.p_value,
        "Alpha, its chance to convict an honest member": verdict.alpha,
        "At": datetime.fromtimestamp(verdict.at, UTC).isoformat(" ", "seconds"),
        "Seconds": f"{verdict.seconds:.2f}",
        "Worker": verdict.worker,
    }
    return rendered(
        "proofserve.fleet",
        "verdict_page.html",
        style=STYLE,
        verdict=verdict,
        facts=facts,
        lines=content.get("lines", ()),
        distances=list(content.get("distances", {}).items())[:_MOST_DISTANCES],
    )
