"""What a fleet's page shows, read from what this controller knows."""

import importlib.metadata
import time
from collections.abc import Iterator
from dataclasses import dataclass

from proofserve.api.node_page import NodeHistory, offered
from proofserve.api.status import answer_of_outbox
from proofserve.dashboard.records import DashboardSnapshot, Fact, KeyFigure, Level, RoundPanel
from proofserve.dashboard.routes import SnapshotUnavailable
from proofserve.fleet.dashboard.member_history import MemberHistory
from proofserve.fleet.dashboard.member_rows import member_row
from proofserve.fleet.dashboard.verification_panels import distance_histogram, job_panel
from proofserve.fleet.records import MemberState
from proofserve.fleet.watch import FleetWatch, Overview
from proofserve.rounds.ports import PublishedResults
from proofserve.rounds.state import State
from proofserve.rounds.status import OutboxGauges, Status

COLUMNS = ("stalled_s", "rate", "chat_wait_s", "held_back_by", "outbox_age_s")
# Callbacks to the network that have waited for so long deserve a look, seconds.
LATE_S = 60.0
# A view of the database that is older is of no use, seconds.
_OLDEST_S = 15.0
_BROKEN = (MemberState.LOST, MemberState.REFUSED)


@dataclass(frozen=True, slots=True)
class FleetPage:
    """Reads the fleet for its page. ``round_history`` and ``members`` are fed by other tasks."""

    watch: FleetWatch
    results: PublishedResults
    round_history: NodeHistory
    members: MemberHistory
    verifies: bool

    async def snapshot(self) -> DashboardSnapshot:
        """Raises SnapshotUnavailable while the database does not answer."""
        if self.watch.age_s > _OLDEST_S:
            why = self.watch.error or "it is slow"
            raise SnapshotUnavailable(
                f"the fleet's database has not answered for {self.watch.age_s:.0f} s: {why}"
            )
        outbox, _ = await answer_of_outbox(self.results.gauges())
        overview, status = self.watch.current, self.round_history.look()
        deployment = overview.deployment
        names = deployment.engine_info.model_names if deployment else ()
        return DashboardSnapshot(
            kind="fleet",
            title=f"Fleet of {names[0]}" if names else "Fleet",
            at=time.time(),
            version=f"proofserve {importlib.metadata.version('proofserve')}",
            note=overview.why_not_ready or "",
            figures=tuple(self._figures(overview, status, outbox)),
            columns=COLUMNS + (("verdict",) if self.verifies or overview.verification.last else ()),
            members=tuple(
                member_row(overview, each, self.members, self.verifies) for each in overview.members
            ),
            round=self._round(status),
            distances=distance_histogram(overview.verification),
            jobs=job_panel(overview.verification, time.time()),
            actions=offered(deployment, status) if deployment and names else (),
        )

    def _figures(
        self, overview: Overview, status: Status, outbox: OutboxGauges | None
    ) -> Iterator[KeyFigure]:
        stats, trend = status.stats, self.round_history.rate()
        rate = stats.recent_rate if stats and status.state is State.GENERATING else 0.0
        yield KeyFigure(label="Nonces", value=rate, unit="/s", hint="of all members", trend=trend)
        states = [each.state for each in overview.members]
        broken = sum(state in _BROKEN for state in states)
        yield KeyFigure(
            label="Members ready",
            value=len(overview.ready),
            of=len(states),
            hint=f"{broken} lost or refused" if broken else "",
            level=Level.BAD if not overview.ready else Level.WARNING if broken else Level.GOOD,
        )
        if stats is not None:
            yield KeyFigure(label="Stored of this round", value=stats.processed)
            failed = Level.WARNING if stats.failed else Level.GOOD
            yield KeyFigure(label="Without a result", value=stats.failed, level=failed)
        if status.lanes is not None:
            given, total = len(status.lanes.processed), status.lanes.total
            level = Level.WARNING if given >= total else Level.GOOD
            yield KeyFigure(label="Lanes given", value=given, of=total, level=level)
        if outbox is not None:
            late = Level.WARNING if outbox.oldest_pending_s > LATE_S else Level.GOOD
            hint = "to the network"
            yield KeyFigure(label="Callbacks waiting", value=outbox.pending, hint=hint, level=late)
        queue = status.queue
        hint = "nonces that wait or run"
        yield KeyFigure(label="Jobs", value=queue.queued_nonces, of=queue.limit, hint=hint)

    def _round(self, status: Status) -> RoundPanel | None:
        if status.spec is None or status.stats is None:
            return None
        state, level = status.state.value.lower(), Level.IDLE
        if status.state in (State.GENERATING, State.VALIDATING):
            level = Level.WARNING if status.paused_reason else Level.GOOD
        return RoundPanel(
            id=status.spec.round_id,
            state="paused" if level is Level.WARNING else state,
            level=level,
            started_at=self.round_history.started_at,
            ended_at=self.round_history.ended_at,
            facts=tuple(_round_facts(status)),
            events=self.round_history.events,
            rate=self.round_history.round_rate(),
            rate_until=self.round_history.rate_until,
        )


def _round_facts(status: Status) -> Iterator[Fact]:
    spec, stats = status.spec, status.stats
    if spec is None or stats is None:
        return
    yield Fact(label="Block", value=spec.work.block.hash)
    yield Fact(label="Height", value=spec.work.block.height)
    yield Fact(label="Public key", value=spec.work.public_key)
    yield Fact(label="Scheme", value=spec.work.scheme.name)
    yield Fact(label="Tokens per nonce", value=spec.work.seq_len)
    if spec.target is not None:
        yield Fact(label="Target", value=spec.target.r_target)
        yield Fact(label="Winners", value=stats.found)
    yield Fact(label="Stored", value=stats.processed)
    yield Fact(label="Mean rate", value=stats.rate, unit="/s")
    yield Fact(label="Held back by chat", value=stats.deferred_s, unit="s")
