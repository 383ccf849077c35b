"""The page of a fleet: what it shows, the rates of an hour, and what operators may do."""

import asyncio
import importlib.metadata
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from proofserve.api.node import answer_of_outbox
from proofserve.api.node_page import (
    COLUMNS,
    NodeHistory,
    node_facts,
    offered,
    round_panel,
    work_figures,
)
from proofserve.dashboard.records import (
    STEP_S,
    ActionField,
    ActionOffer,
    DashboardSnapshot,
    DistanceHistogram,
    Fact,
    History,
    JobPanel,
    KeyFigure,
    LastVerdict,
    Level,
    MemberRow,
    ShownVerdict,
)
from proofserve.dashboard.routes import SnapshotUnavailable
from proofserve.fleet.members import MemberCondition
from proofserve.fleet.records import Member, MemberSource, MemberState, Wish
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification_records import JobPhase, VerdictOutcome, VerificationView
from proofserve.fleet.watch import FleetWatch, Overview
from proofserve.rounds.status import OutboxGauges, Status
from proofserve.wire import FLEET

# A view of the database that is older is of no use, seconds.
_OLDEST_S = 15.0
_LEVELS = {
    MemberState.LOST: Level.BAD,
    MemberState.REFUSED: Level.BAD,
    MemberState.JOINING: Level.WARNING,
    MemberState.CORDONED: Level.IDLE,
    MemberState.DRAINING: Level.IDLE,
}
_REASON = ActionField(name="reason", label="Reason, for other operators", required=True)
_SHOWN: Final[dict[VerdictOutcome, ShownVerdict]] = {
    VerdictOutcome.HONEST: "honest",
    VerdictOutcome.FRAUD: "fraud",
    VerdictOutcome.UNDECIDED: "undecided",
    VerdictOutcome.UNPROVED: "unproved",
    VerdictOutcome.ABSTAINED: "no verdict",
}


@dataclass(eq=False, repr=False)
class FleetPage:
    """Reads the fleet for its page, with the rates of members while ``measure_for_ever`` runs.

    It has the history of the fleet's round, and ``verifies`` if the fleet has a policy.
    """

    _watch: FleetWatch
    _store: FleetStore
    _round_history: NodeHistory
    _verifies: bool
    _rates: dict[str, History] = field(default_factory=dict, init=False)

    async def measure_for_ever(self) -> None:
        """Add a value for each member every ``STEP_S`` seconds; forget who is a member no more."""
        while True:
            members = self._watch.current.by_id
            for id_ in self._rates.keys() - members.keys():
                del self._rates[id_]
            for id_, condition in members.items():
                self._rates.setdefault(id_, History()).add(condition.rate)
            await asyncio.sleep(STEP_S)

    async def snapshot(self) -> DashboardSnapshot:
        """Raises SnapshotUnavailable while the database does not answer."""
        if self._watch.age_s > _OLDEST_S:
            why = self._watch.error or "it is slow"
            raise SnapshotUnavailable(
                f"the fleet's database has not answered for {self._watch.age_s:.0f} s: {why}"
            )
        outbox, _ = await answer_of_outbox(self._store.gauges())
        overview, status = self._watch.current, self._round_history.look()
        deployment = overview.deployment
        names = deployment.engine_info.model_names if deployment else ()
        return DashboardSnapshot(
            kind="fleet",
            title=f"Fleet of {names[0]}" if names else "Fleet",
            at=time.time(),
            version=f"proofserve {importlib.metadata.version('proofserve')}",
            note=overview.why_not_ready or "",
            figures=tuple(self._figures(overview, status, outbox)),
            columns=COLUMNS
            + (("verdict",) if self._verifies or overview.verification.last else ()),
            members=tuple(
                member_row(overview, each, self._rates.get(each.member.id), self._verifies)
                for each in overview.members
            ),
            round=round_panel(status, self._round_history, None),
            distances=distance_histogram(overview.verification),
            jobs=job_panel(overview.verification, time.time()),
            actions=offered(deployment, status) if deployment and names else (),
        )

    def _figures(
        self, overview: Overview, status: Status, outbox: OutboxGauges | None
    ) -> Iterator[KeyFigure]:
        states = [each.state for each in overview.members]
        broken = sum(_LEVELS.get(state) is Level.BAD for state in states)
        yield KeyFigure(
            label="Members ready",
            value=len(overview.ready),
            of=len(states),
            hint=f"{broken} lost or refused" if broken else "",
            level=Level.BAD if not overview.ready else Level.WARNING if broken else Level.GOOD,
        )
        yield from work_figures(self._round_history, "of all members", outbox)
        if status.lanes is not None:
            given, total = len(status.lanes.processed), status.lanes.total
            level = Level.WARNING if given >= total else Level.GOOD
            yield KeyFigure(label="Lanes given", value=given, of=total, level=level)


def member_row(
    overview: Overview, condition: MemberCondition, rates: History | None, verifies: bool
) -> MemberRow:
    """``verifies``: an operator may ask for a verdict, because the fleet has a policy."""
    member, status = condition.member, condition.status
    reason = overview.reason_of(condition)
    shown = None
    if (last := overview.verification.last.get(member.id)) is not None:
        shown = LastVerdict(
            verdict=_SHOWN[last.outcome],
            at=last.at,
            test=last.test or "",
            nonces=last.nonces or None,
            distance=last.distance,
            threshold=last.threshold,
        )
    engine, outbox = (status.engine, status.outbox) if status else (None, None)
    deployed, cores = condition.deployment, status.liveness if status else ()
    proves = condition.is_ready and status is not None and status.generates
    return MemberRow(
        id=member.id,
        name=member.name,
        state="proving" if proves else condition.state.value,
        level=_level(overview, condition, reason),
        reason=reason or "",
        version=deployed.versions.get("proofserve", "") if deployed else "",
        model=", ".join(deployed.models) if deployed else "",
        stalled_s=max((core.waited_s for core in cores), default=None),
        rate=rates.trend() if rates is not None else None,
        chat_wait_s=engine.longest_chat_wait_s if engine else None,
        held_back_by=(status.paused_reason or "") if status and condition.generates else "",
        outbox_age_s=outbox.oldest_pending_s if outbox else None,
        verdict=shown,
        facts=tuple(_facts(overview, condition)),
        actions=tuple(_actions(member, verifies)),
    )


def _level(overview: Overview, condition: MemberCondition, reason: str | None) -> Level:
    if overview.verification.convicted(condition.member.id):
        return Level.BAD
    if not condition.is_ready:
        return _LEVELS[condition.state]
    if reason is not None:
        return Level.WARNING
    return Level.GOOD if condition.rate is not None else Level.IDLE


def _facts(overview: Overview, condition: MemberCondition) -> Iterator[Fact]:
    member, status = condition.member, condition.status
    yield Fact(label="Address", value=member.url)
    yield Fact(label="Member by", value=member.source.value)
    if (lane := overview.newest.get(member.id)) is not None:
        ended = " (ended)" if lane.ended_at is not None else ""
        yield Fact(label="Lane of the round", value=f"{lane.lane}{ended}")
        yield Fact(label="Stored of the lane", value=lane.stored)
    if member.seen is not None and member.seen.clock_offset_s is not None:
        yield Fact(label="Its clock is ahead by", value=member.seen.clock_offset_s, unit="s")
    if status is None:
        return
    yield from node_facts(status.engine, status.outbox)
    if status.engine is not None and status.engine.warning is not None:
        yield Fact(label="Chat waits", value=status.engine.warning)
    if (deployed := condition.deployment) is not None:
        yield Fact(label="vLLM", value=deployed.versions.get("vllm", "unknown"))
        yield Fact(label="Digest of the weights", value=deployed.weights_digest or "unknown")


def _actions(member: Member, verifies: bool) -> Iterator[ActionOffer]:
    name = member.name
    if verifies:
        what = f"A worker recomputes a sample of what {name} has proved."
        yield _offer(member, "verify", "Verify now", what)
    if member.wish is not Wish.ACTIVE:
        what = f"{name} takes part in rounds and jobs again."
        yield _offer(member, "uncordon", "Take back", what)
    else:
        what = f"{name} goes on with its lane and gets nothing new."
        yield _offer(member, "cordon", "Cordon", what, fields=(_REASON,))
    if member.wish is not Wish.DRAINING:
        what = f"The lane of {name} ends. What it has proved is still delivered."
        yield _offer(member, "drain", "Drain", what, fields=(_REASON,), dangerous=True)
    if member.source is MemberSource.JOINED:
        what = f"{name} is forgotten until it joins again. Its results stay."
        yield _offer(member, "remove", "Remove", what, fields=(_REASON,), dangerous=True)


def _offer(member: Member, id_: str, label: str, confirmation: str, **more: Any) -> ActionOffer:
    path = f"{FLEET}/members/{member.id}/{id_}"
    return ActionOffer(id=id_, label=label, path=path, confirmation=confirmation, **more)


def job_panel(seen: VerificationView, now: float) -> JobPanel | None:
    """None for a fleet without any verification."""
    if not seen.outcomes and not any(seen.jobs.values()):
        return None
    running, queued = (seen.jobs.get(each, 0) for each in (JobPhase.RUNNING, JobPhase.QUEUED))
    oldest, counts = seen.oldest_asked_at, {"Running": running, "Waiting for a worker": queued}
    counts["Failed in the last day"] = seen.jobs.get(JobPhase.FAILED, 0)
    counts |= {f"Verdicts: {_SHOWN[each]}": seen.outcomes.get(each, 0) for each in VerdictOutcome}
    return JobPanel(
        unit="verifications",
        queued=running + queued,
        oldest_s=None if oldest is None else max(0.0, now - oldest),
        states=tuple(Fact(label=label, value=count) for label, count in counts.items()),
    )


def distance_histogram(seen: VerificationView) -> DistanceHistogram | None:
    found = seen.distances
    if found is None:
        return None
    return DistanceHistogram(
        edges=found.edges,
        counts=found.counts,
        threshold=found.threshold,
        about=f"nonces of the newest {found.verdicts} verdicts",
    )
