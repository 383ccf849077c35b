"""The page of a node, behind the node's keys: what it shows, and what an operator may do there."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Final, Literal

from fastapi import APIRouter, Request

from proofserve.api.access import ApiError
from proofserve.api.node import NODE, Deployment, Node, status_of
from proofserve.api.requests import guarded
from proofserve.dashboard import routes
from proofserve.dashboard.records import (
    STEP_S,
    ActionField,
    ActionOffer,
    DashboardSnapshot,
    Fact,
    History,
    KeyFigure,
    Level,
    MemberRow,
    RoundPanel,
    TimelineEvent,
    Trend,
)
from proofserve.dashboard.routes import SnapshotFeed
from proofserve.protocol import DEFAULT_SCHEME, SEQ_LEN, default_k_dim
from proofserve.rounds.records import RoundSpec
from proofserve.rounds.state import State
from proofserve.rounds.status import EngineGauges, OutboxGauges, RoundStats, Status
from proofserve.wire import PROOFS
from proofserve.wire.status import NodeStatusResponse

_RUNNING = (State.GENERATING, State.VALIDATING)


# -- the past --------------------------------------------------------------------------------------

# Seconds between two looks at the round.
LOOK_S = 1.0
_NOTHING: tuple[State | None, str | None, str | None, str | None] = (None, None, None, None)
# Values of the round's chart: half an hour.
_CHART = 360
_TEXT_OF = {
    State.GENERATING: "generating",
    State.VALIDATING: "judging claims",
    State.STOPPED: "stopped",
    State.IDLE: "configured",
}


@dataclass(eq=False)
class NodeHistory:
    """Looks at ``status`` each second while ``watch`` runs, and whenever the page is shown.

    ``stall`` says why engine cores hang, ``clock`` gives Unix seconds.
    """

    _status: Callable[[], Status]
    _stall: Callable[[], str | None]
    _clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._rate = History()
        self._round_id: str | None = None
        # The state at the last look, and the reasons of a pause, of a fault and of a hang.
        self._seen = _NOTHING
        self._deferred_calls = 0
        self.events: deque[TimelineEvent] = deque(maxlen=40)
        """What happened in the round, oldest first; older events are in the log."""
        self.chat_holds_back = False
        """Whether chat deferred proofs in the last step."""
        self.started_at = self.rate_until = self._clock()
        """When the round was first seen, and when the last value of the rate was measured."""
        self.ended_at: float | None = None

    async def watch(self) -> None:
        for look in count():
            if look % round(STEP_S / LOOK_S) == 0:
                self.measure()
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> Status:
        """Note what has changed since the last look; returns what was seen."""
        status = self._status()
        round_id = status.spec.round_id if status.spec is not None else None
        if round_id != self._round_id:
            self._round_id, self._seen, self.ended_at = round_id, _NOTHING, None
            self.events.clear()
            self.started_at = self._clock()
        if round_id is not None:
            reasons = (status.paused_reason, status.error, self._stall())
            self._note(status.state, *reasons)
        return status

    def measure(self) -> None:
        """Add one value of the rate; one step has passed since the last one."""
        status = self._status()
        running, stats = status.state is State.GENERATING, status.stats
        self._rate.add(stats.recent_nonces_per_second if running and stats is not None else None)
        self.rate_until = self._clock()
        calls = stats.deferred_calls if stats is not None else 0
        self.chat_holds_back = running and calls > self._deferred_calls
        self._deferred_calls = calls

    def rate(self) -> Trend:
        return self._rate.trend()

    def round_rate(self) -> Trend:
        """Since the round began, at most half an hour."""
        since = int((self._clock() - self.started_at) / STEP_S) + 1
        return self._rate.trend(min(since, _CHART))

    def _note(self, state: State, paused: str | None, error: str | None, stall: str | None) -> None:
        (state_before, paused_before, error_before, stall_before) = self._seen
        self._seen = (state, paused, error, stall)
        if state is not state_before:
            self._add(_TEXT_OF[state])
            self.ended_at = None if state in _RUNNING else self._clock()
        if paused and paused != paused_before:
            self._add(f"paused: {paused}", Level.WARNING)
        elif paused_before and not paused and state in _RUNNING:
            self._add("goes on")
        if error and error != error_before:
            self._add(f"ended by a fault: {error}", Level.BAD)
        # The reason counts the seconds: it changes while the engine hangs.
        if stall and not stall_before:
            self._add(f"stalled: {stall}", Level.BAD)
        elif stall_before and not stall:
            self._add("the engine steps again")

    def _add(self, text: str, level: Level = Level.GOOD) -> None:
        # The whole text is in /status and in the log.
        self.events.append(TimelineEvent(at=self._clock(), text=text[:300], level=level))


# -- the present -----------------------------------------------------------------------------------

COLUMNS = ("stalled_s", "rate", "chat_wait_s", "held_back_by", "outbox_age_s")
# An outbox that has not delivered for so long deserves a look, seconds.
LATE_S = 60.0
# Versions in the head of the page.
_SHOWN = {"proofserve": "proofserve", "vllm": "vLLM"}


async def snapshot_of(node: Node, history: NodeHistory) -> DashboardSnapshot:
    """What ``/status`` says at the moment. Takes as long as that."""
    status = history.look()
    seen = await status_of(node)
    engine_info = node.deployment.engine_info
    versions = engine_info.versions
    return DashboardSnapshot(
        kind="node",
        title=engine_info.model_names[0],
        at=time.time(),
        version=", ".join(
            f"{_SHOWN[name]} {versions[name]}" for name in _SHOWN if name in versions
        ),
        figures=tuple(_figures(node, seen, history)),
        columns=COLUMNS,
        members=(_member(node, seen, history),),
        round=round_panel(status, history, node.stall),
        actions=offered(node.deployment, status),
    )


def _member(node: Node, seen: NodeStatusResponse, history: NodeHistory) -> MemberRow:
    stall = node.stall
    state, level, reason = _state(seen, history, stall)
    holds_back = "the engine hangs" if stall else seen.paused_reason
    if holds_back is None and history.chat_holds_back:
        holds_back = "chat"
    # Of the core that has waited longest; None if none is watched.
    waited = [core.waited_s for core in seen.liveness if core.watched]
    digest = seen.deployment.weights_digest
    return MemberRow(
        id="node",
        name="this node",
        state=state,
        level=level,
        reason=reason,
        version=seen.deployment.versions.get("vllm", ""),
        model=", ".join(seen.deployment.models),
        stalled_s=max(waited, default=None),
        rate=history.rate(),
        chat_wait_s=seen.engine.longest_chat_wait_s if seen.engine else None,
        held_back_by=(holds_back or "") if seen.state is State.GENERATING else "",
        outbox_age_s=seen.outbox.oldest_pending_s if seen.outbox else None,
        facts=(
            *node_facts(seen.engine, seen.outbox),
            Fact(label="Scheme", value=seen.scheme or "as each request says"),
            *([Fact(label="Digest of the weights", value=digest)] if digest is not None else []),
        ),
    )


def _state(
    seen: NodeStatusResponse, history: NodeHistory, stall: str | None
) -> tuple[str, Level, str]:
    """The member's state in a word or two, and the reason where it is not well."""
    late, slow, outbox = None, None, seen.outbox
    if seen.engine is not None and seen.state is State.GENERATING:
        slow = seen.engine.warning
    if outbox is not None and outbox.oldest_pending_s > LATE_S:
        late = outbox.last_error or "no callback was delivered"
    # The worst first.
    for word, level, trouble in (
        ("engine stalled", Level.BAD, stall),
        ("engine silent", Level.BAD, seen.engine_error),
        ("outbox fails", Level.BAD, seen.outbox_error),
        ("paused", Level.WARNING, seen.paused_reason),
        ("round failed", Level.WARNING, seen.error),
        ("chat waits", Level.WARNING, slow),
        ("callbacks late", Level.WARNING, late),
    ):
        if trouble is not None:
            return word, level, trouble
    if seen.state is State.VALIDATING:
        return "judging", Level.GOOD, ""
    if seen.state is not State.GENERATING:
        return "idle", Level.IDLE, ""
    # Chat leaves proofs no time at all.
    if history.chat_holds_back and not (history.rate().values or (0,))[-1]:
        return "waits for chat", Level.GOOD, "chat uses the engine; proofs go on when it pauses"
    return "proving", Level.GOOD, ""


def node_facts(engine: EngineGauges | None, outbox: OutboxGauges | None) -> Iterator[Fact]:
    if engine is not None:
        yield Fact(label="Forwards of proofs", value=engine.forwards)
        yield Fact(label="Last forward", value=engine.last_forward_s, unit="s")
        yield Fact(label="Nonces of a forward", value=engine.forward_nonces)
        yield Fact(label="Engine time of proofs", value=engine.busy_s, unit="s")
        yield Fact(label="Chat while proofs waited", value=engine.deferred_s, unit="s")
        yield Fact(label="Chat requests in the engine", value=engine.unfinished_requests)
        yield Fact(label="KV blocks free", value=engine.free_blocks)
        yield Fact(label="KV blocks on lease", value=engine.leased_blocks)
        yield Fact(label="Engine cores", value=len(engine.cores) or 1)
    if outbox is not None:
        yield Fact(label="Results kept", value=outbox.results)
        yield Fact(label="Callbacks waiting", value=outbox.pending)
        yield Fact(label="Callbacks delivered", value=outbox.delivered)
        yield Fact(label="Callbacks expired", value=outbox.expired)
        if outbox.last_error:
            yield Fact(label="Last fault of a callback", value=outbox.last_error)


def _figures(node: Node, seen: NodeStatusResponse, history: NodeHistory) -> Iterator[KeyFigure]:
    yield from work_figures(history, "over the last 30 s", seen.outbox)
    engine, hint, level = seen.engine, "for a proof, since start", Level.GOOD
    if engine is not None and engine.max_wait_s:
        hint += f"; at most {engine.max_wait_s:g} s is wanted"
        level = Level.WARNING if engine.warning else Level.GOOD
    wait = engine.longest_chat_wait_s if engine else None
    yield KeyFigure(label="Chat's longest wait", value=wait, unit="s", hint=hint, level=level)
    judged = node.manager.totals.validations
    hint = f"{judged['fraud']} fraud, {judged['error']} failed"
    yield KeyFigure(label="Validations", value=judged.total(), hint=hint)


def work_figures(
    history: NodeHistory, rate_of: str, outbox: OutboxGauges | None
) -> Iterator[KeyFigure]:
    """The work of a node, or of a fleet; ``rate_of`` says what its rate is the rate of."""
    status = history.look()
    stats, queue = status.stats, status.queue
    rate = stats.recent_nonces_per_second if stats and status.state is State.GENERATING else 0.0
    yield KeyFigure(label="Nonces", value=rate, unit="/s", hint=rate_of, trend=history.rate())
    if stats is not None:
        yield KeyFigure(label="Proved in this round", value=stats.total_processed)
        failed = Level.WARNING if stats.failed else Level.GOOD
        yield KeyFigure(label="Without a result", value=stats.failed, level=failed)
    if outbox is not None:
        late = Level.WARNING if outbox.oldest_pending_s > LATE_S else Level.GOOD
        yield KeyFigure(label="Callbacks waiting", value=outbox.pending, level=late)
    # New jobs may soon be refused.
    full = Level.WARNING if queue.queued_nonces > 0.8 * queue.limit else Level.GOOD
    hint = "nonces that wait or run"
    yield KeyFigure(label="Jobs", value=queue.queued_nonces, of=queue.limit, hint=hint, level=full)


def round_panel(status: Status, history: NodeHistory, stall: str | None) -> RoundPanel | None:
    """The round of a node, or of a fleet; None before the first one."""
    spec, stats = status.spec, status.stats
    if spec is None or stats is None:
        return None
    state, level = status.state.value.lower(), Level.IDLE
    if status.state in _RUNNING:
        level = Level.GOOD
        if stall:
            state, level = "stalled", Level.BAD
        elif status.paused_reason:
            state, level = "paused", Level.WARNING
    elif status.error:
        level = Level.WARNING
    return RoundPanel(
        id=spec.round_id,
        state=state,
        level=level,
        started_at=history.started_at,
        ended_at=history.ended_at,
        facts=tuple(_round_facts(spec, stats)),
        events=tuple(history.events),
        rate=history.round_rate(),
        rate_until=history.rate_until,
    )


def _round_facts(spec: RoundSpec, stats: RoundStats) -> Iterator[Fact]:
    yield Fact(label="Block", value=spec.work.block.hash)
    yield Fact(label="Height", value=spec.work.block.height)
    yield Fact(label="Public key", value=spec.work.public_key)
    yield Fact(label="Scheme", value=spec.work.scheme.name)
    yield Fact(label="Tokens per nonce", value=spec.work.seq_len)
    if (lane := spec.lane) is not None:
        yield Fact(label="Node", value=f"{lane.node_id} of {lane.node_count}")
        yield Fact(label="Group", value=f"{lane.group_id} of {lane.n_groups}")
    if spec.target is not None:
        yield Fact(label="Target", value=spec.target.r_target)
        yield Fact(label="Winners", value=stats.total_found)
    yield Fact(label="Proved", value=stats.total_processed)
    yield Fact(label="Mean rate", value=stats.nonces_per_second, unit="/s")
    yield Fact(label="Held back by chat", value=stats.deferred_s, unit="s")
    yield Fact(label="Faults of the engine", value=stats.faults)


# -- actions ---------------------------------------------------------------------------------------

_STOP = ActionOffer(
    id="stop",
    label="Stop round",
    path=f"{PROOFS}/stop",
    confirmation="The round ends, its finished results are stored and sent, and queued jobs are"
    " cancelled. A new round has to be ordered again.",
    dangerous=True,
)
_CONTINUE = ActionOffer(
    id="continue",
    label="Continue round",
    path=f"{PROOFS}/phase/generate",
    confirmation="The configured distance round generates again, from its next nonce.",
)


def offered(deployment: Deployment, status: Status) -> tuple[ActionOffer, ...]:
    if status.state in _RUNNING:
        return (_STOP,)
    start = _start(deployment, status.spec)
    is_distance = status.spec is not None and status.spec.target is not None
    return (_CONTINUE, start) if is_distance else (start,)


_DIMENSIONS: Final = "Dimensions; if empty, those of the scheme"


def _start(deployment: Deployment, last: RoundSpec | None) -> ActionOffer:
    """Start a round of artifacts: as the last one was, or with values that fit the deployment."""
    engine_info = deployment.engine_info
    seq_len = deployment.seq_len or min(SEQ_LEN, engine_info.max_seq_len)
    scheme = deployment.scheme or DEFAULT_SCHEME
    k_dim = deployment.k_dim
    block_hash, height, key, node_id, node_count = "", 0, "", 0, 1
    body: dict[str, object] = {}
    if last is not None:
        block_hash, height = last.work.block.hash, last.work.block.height
        key = last.work.public_key
        if last.lane is not None:
            node_id, node_count = last.lane.node_id, last.lane.node_count
            body = {"group_id": last.lane.group_id, "n_groups": last.lane.n_groups}
        if last.target is None:
            wire = last.work.scheme.to_wire()
            scheme, seq_len = str(wire["name"]), last.work.seq_len
            k_dim = None if wire["k_dim"] == default_k_dim(scheme) else int(wire["k_dim"])
            body |= {"commit": "roots" if last.commits_roots else "vectors"}
    return ActionOffer(
        id="start",
        label="Start round",
        path=f"{PROOFS}/init/generate",
        confirmation="The node generates proofs in the time that chat leaves free, until the round"
        " is stopped.",
        body={**body, "params": {"model": engine_info.model_names[0]}},
        fields=(
            _needed("block_hash", "Block hash", block_hash),
            _needed("block_height", "Block height", height),
            _needed("public_key", "Public key", key),
            _needed("node_id", "Node id", node_id),
            _needed("node_count", "Nodes", node_count),
            _needed("scheme", "Scheme", scheme),
            _needed("params.seq_len", "Tokens per nonce", seq_len),
            ActionField(name="params.k_dim", label=_DIMENSIONS, kind="integer", value=k_dim),
            ActionField(name="url", label="Callback URL; without one, results stay in /results"),
        ),
    )


def _needed(name: str, label: str, value: str | int) -> ActionField:
    kind: Literal["integer", "text"] = "integer" if isinstance(value, int) else "text"
    return ActionField(name=name, label=label, kind=kind, value=value, required=True)


# -- routes ----------------------------------------------------------------------------------------


def router(get_node: Callable[[Request], Node]) -> APIRouter:
    """The routes of the page; its data need a viewer's or an operator's key."""

    def feed_of(request: Request) -> SnapshotFeed:
        node: Node = request.scope[NODE]
        if node.dashboard is None:
            text = "the dashboard is off; start the server with --poc-dashboard"
            raise ApiError("not_enabled", text)
        return node.dashboard

    return routes.router(feed_of, guarded(get_node))


def with_dashboard(node: Node, history: NodeHistory) -> Node:
    """``node`` with a feed that reads it; ``history`` is fed by another task."""
    feed = SnapshotFeed(partial(snapshot_of, node, history), lambda: node.manager.is_closing)
    return replace(node, dashboard=feed)
