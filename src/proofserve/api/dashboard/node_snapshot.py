"""What a node's page shows, read from the node as its ``/status`` is."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

from proofserve.api.dashboard.node_actions import offered
from proofserve.api.dashboard.node_history import NodeHistory
from proofserve.api.node import Node
from proofserve.api.status import answer_of_outbox, read_engine
from proofserve.dashboard.records import (
    DashboardSnapshot,
    Fact,
    KeyFigure,
    Level,
    MemberRow,
    RoundPanel,
)
from proofserve.rounds.records import RoundSpec
from proofserve.rounds.state import State
from proofserve.rounds.status import EngineGauges, OutboxGauges, Stats, Status

COLUMNS = ("stalled_s", "rate", "chat_wait_s", "held_back_by", "outbox_age_s")
# An outbox that has not delivered for so long deserves a look, seconds.
LATE_S = 60.0
# The part of the job queue above which new jobs may soon be refused.
_FULL = 0.8
# Versions in the head of the page.
_SHOWN = {"proofserve": "proofserve", "vllm": "vLLM"}
_RUNNING = (State.GENERATING, State.VALIDATING)


@dataclass(frozen=True, slots=True)
class NodeReading:
    """One look at all parts of a node. A part that does not answer is None; its error says why."""

    status: Status
    engine: EngineGauges | None
    engine_error: str | None
    outbox: OutboxGauges | None
    outbox_error: str | None
    stall: str | None
    stalled_s: float | None
    """Seconds without a step of the core that has waited longest; None if none is watched."""


async def snapshot_of(node: Node, history: NodeHistory) -> DashboardSnapshot:
    """Takes as long as the slower of engine and outbox, at most 5 s."""
    of_outbox = answer_of_outbox(node.outbox.gauges())
    (engine, engine_error), (outbox, outbox_error) = await asyncio.gather(
        read_engine(node), of_outbox
    )
    waited = [core.waited_s for core in node.liveness() if core.watched]
    seen = NodeReading(
        status=history.look(),
        engine=engine,
        engine_error=engine_error,
        outbox=outbox,
        outbox_error=outbox_error,
        stall=node.stall,
        stalled_s=max(waited, default=None),
    )
    versions = node.deployment.engine_info.versions
    return DashboardSnapshot(
        kind="node",
        title=node.deployment.engine_info.model_names[0],
        at=time.time(),
        version=", ".join(
            f"{_SHOWN[name]} {versions[name]}" for name in _SHOWN if name in versions
        ),
        figures=tuple(_figures(node, seen, history)),
        columns=COLUMNS,
        members=(_member(node, seen, history),),
        round=_round(seen, history),
        actions=offered(node.deployment, seen.status),
    )


def _member(node: Node, seen: NodeReading, history: NodeHistory) -> MemberRow:
    state, level, reason = _state(seen, history)
    status, engine_info = seen.status, node.deployment.engine_info
    running = status.state is State.GENERATING
    holds_back = "the engine hangs" if seen.stall else status.paused_reason
    if holds_back is None and history.chat_holds_back:
        holds_back = "chat"
    return MemberRow(
        id="node",
        name="this node",
        state=state,
        level=level,
        reason=reason,
        version=engine_info.versions.get("vllm", ""),
        model=", ".join(engine_info.model_names),
        stalled_s=seen.stalled_s,
        rate=history.rate(),
        chat_wait_s=seen.engine.longest_chat_wait_s if seen.engine else None,
        held_back_by=(holds_back or "") if running else "",
        outbox_age_s=seen.outbox.oldest_pending_s if seen.outbox else None,
        facts=tuple(_facts(node, seen)),
    )


def _state(seen: NodeReading, history: NodeHistory) -> tuple[str, Level, str]:
    """The member's state in a word or two, and the reason where it is not well."""
    return next(_troubles(seen), None) or _ordinary_state(seen.status.state, history)


def _troubles(seen: NodeReading) -> Iterator[tuple[str, Level, str]]:
    """What is not well, the worst first."""
    status, outbox = seen.status, seen.outbox
    if seen.stall is not None:
        yield "engine stalled", Level.BAD, seen.stall
    if seen.engine_error is not None:
        yield "engine silent", Level.BAD, seen.engine_error
    if seen.outbox_error is not None:
        yield "outbox fails", Level.BAD, seen.outbox_error
    if status.paused_reason is not None:
        yield "paused", Level.WARNING, status.paused_reason
    if status.error is not None:
        yield "round failed", Level.WARNING, status.error
    if outbox is not None and outbox.oldest_pending_s > LATE_S:
        reason = outbox.last_error or "no callback was delivered"
        yield "callbacks late", Level.WARNING, reason


def _ordinary_state(state: State, history: NodeHistory) -> tuple[str, Level, str]:
    if state is State.VALIDATING:
        return "judging", Level.GOOD, ""
    if state is not State.GENERATING:
        return "idle", Level.IDLE, ""
    if _waits(history):
        return "waits for chat", Level.GOOD, "chat uses the engine; proofs go on when it pauses"
    return "proving", Level.GOOD, ""


def _waits(history: NodeHistory) -> bool:
    """Whether chat leaves proofs no time at all."""
    return history.chat_holds_back and not (history.rate().values or (0,))[-1]


def _facts(node: Node, seen: NodeReading) -> Iterator[Fact]:
    if (engine := seen.engine) is not None:
        yield Fact(label="Forwards of proofs", value=engine.forwards)
        yield Fact(label="Last forward", value=engine.last_forward_s, unit="s")
        yield Fact(label="Engine time of proofs", value=engine.busy_s, unit="s")
        yield Fact(label="Chat while proofs waited", value=engine.deferred_s, unit="s")
        yield Fact(label="Chat requests in the engine", value=engine.unfinished_requests)
        yield Fact(label="KV blocks free", value=engine.free_blocks)
        yield Fact(label="KV blocks on lease", value=engine.leased_blocks)
        yield Fact(label="Engine cores", value=len(engine.cores) or 1)
    if (outbox := seen.outbox) is not None:
        yield Fact(label="Results kept", value=outbox.results)
        yield Fact(label="Callbacks waiting", value=outbox.pending)
        yield Fact(label="Callbacks delivered", value=outbox.delivered)
        yield Fact(label="Callbacks expired", value=outbox.expired)
        if outbox.last_error:
            yield Fact(label="Last fault of a callback", value=outbox.last_error)
    facts = node.deployment.engine_info.facts
    yield Fact(label="Scheme", value=node.deployment.scheme or "as each request says")
    if facts.weights_digest is not None:
        yield Fact(label="Digest of the weights", value=facts.weights_digest)


def _figures(node: Node, seen: NodeReading, history: NodeHistory) -> Iterator[KeyFigure]:
    status, stats = seen.status, seen.status.stats
    running = status.state is State.GENERATING and stats is not None
    rate = stats.recent_rate if running and stats is not None else 0.0
    hint = "over the last 30 s"
    yield KeyFigure(label="Nonces", value=rate, unit="/s", hint=hint, trend=history.rate())
    if stats is not None:
        yield KeyFigure(label="Proved in this round", value=stats.processed)
        failed = Level.WARNING if stats.failed else Level.GOOD
        yield KeyFigure(label="Without a result", value=stats.failed, level=failed)
    wait = seen.engine.longest_chat_wait_s if seen.engine else None
    yield KeyFigure(
        label="Chat's longest wait", value=wait, unit="s", hint="for a proof, since start"
    )
    if seen.outbox is not None:
        late = Level.WARNING if seen.outbox.oldest_pending_s > LATE_S else Level.GOOD
        yield KeyFigure(label="Callbacks waiting", value=seen.outbox.pending, level=late)
    queue = status.queue
    full = Level.WARNING if queue.queued_nonces > _FULL * queue.limit else Level.GOOD
    hint = "nonces that wait or run"
    yield KeyFigure(label="Jobs", value=queue.queued_nonces, of=queue.limit, hint=hint, level=full)
    judged = node.manager.totals.validations
    hint = f"{judged['fraud']} fraud, {judged['error']} failed"
    yield KeyFigure(label="Validations", value=judged.total(), hint=hint)


def _round(seen: NodeReading, history: NodeHistory) -> RoundPanel | None:
    status = seen.status
    spec, stats = status.spec, status.stats
    if spec is None or stats is None:
        return None
    state, level = status.state.value.lower(), Level.IDLE
    if status.state in _RUNNING:
        level = Level.GOOD
        if seen.stall:
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
        events=history.events,
        rate=history.round_rate(),
        rate_until=history.rate_until,
    )


def _round_facts(spec: RoundSpec, stats: Stats) -> Iterator[Fact]:
    yield Fact(label="Block", value=spec.work.block.hash)
    yield Fact(label="Height", value=spec.work.block.height)
    yield Fact(label="Public key", value=spec.work.public_key)
    yield Fact(label="Scheme", value=str(spec.work.scheme.name))
    yield Fact(label="Tokens per nonce", value=spec.work.seq_len)
    if (lane := spec.lane) is not None:
        yield Fact(label="Node", value=f"{lane.node_id} of {lane.node_count}")
        yield Fact(label="Group", value=f"{lane.group_id} of {lane.n_groups}")
    if spec.target is not None:
        yield Fact(label="Target", value=spec.target.r_target)
        yield Fact(label="Winners", value=stats.found)
    yield Fact(label="Proved", value=stats.processed)
    yield Fact(label="Mean rate", value=stats.rate, unit="/s")
    yield Fact(label="Held back by chat", value=stats.deferred_s, unit="s")
    yield Fact(label="Faults of the engine", value=stats.faults)
