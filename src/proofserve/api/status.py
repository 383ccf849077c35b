"""Reads the parts of a node: its rounds, engine, outbox and receipts, for ``GET /status``."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from proofserve.api.node import Deployment, Node, joined
from proofserve.protocol.sketch import cost_of_few_values
from proofserve.rounds.errors import EngineFault, EngineGone, OutboxUnavailable
from proofserve.rounds.records import Winner
from proofserve.rounds.status import EngineGauges, ReceiptGauges, RoundStats, Status
from proofserve.wire.status import DeploymentStatus, NodeStatusResponse, PowStatus, RoundConfig

T = TypeVar("T")

# The longest wait for the outbox, in seconds; the engine's answer has its own limit.
OUTBOX_ANSWER_S = 5.0
_NOTHING = RoundStats(0, 0, 0.0, 0.0, 0, 0.0, 0, 0.0, 0)


async def status_of(node: Node) -> NodeStatusResponse:
    """Takes as long as the slowest of engine and outbox."""
    status = node.manager.status()
    of_outbox = answer_of_outbox(node.outbox.gauges())
    of_round = pow_status(node, status)
    parts = await asyncio.gather(of_round, of_outbox, read_engine(node), read_receipts(node))
    fields, (outbox, outbox_error), (engine, engine_error), (receipts, receipts_error) = parts
    spec = status.spec
    of_url = node.url_warnings.get(spec.round_id) if spec else None
    return NodeStatusResponse(
        status=status.state,
        **fields,
        config=RoundConfig.of(spec) if spec else None,
        stats=status.stats,
        round_id=spec.round_id if spec else None,
        scheme=node.deployment.scheme,
        paused_reason=status.paused_reason,
        error=status.error,
        warning=joined(
            of_url,
            cost_of_few_values(spec.work.scheme) if spec else None,
            engine and engine.warning,
        ),
        cores=list(status.cores),
        lanes=status.lanes,
        queue=status.queue,
        outbox=outbox,
        outbox_error=outbox_error,
        engine=engine,
        engine_error=engine_error,
        liveness=list(node.liveness()),
        fleet=node.membership(),
        receipts=receipts,
        receipts_error=receipts_error,
        deployment=_deployment(node.deployment),
    )


def _deployment(deployment: Deployment) -> DeploymentStatus:
    engine_info = deployment.engine_info
    facts = engine_info.facts
    return DeploymentStatus(
        models=list(engine_info.model_names),
        max_seq_len=engine_info.max_seq_len,
        hidden_size=facts.hidden_size,
        weights_digest=facts.weights_digest,
        token_ids=len(facts.tokens) if facts.tokens else 0,
        scheme=deployment.scheme,
        seq_len=deployment.seq_len,
        k_dim=deployment.k_dim,
        max_nonces=deployment.max_nonces,
        versions=dict(engine_info.versions),
    )


async def pow_status(node: Node, status: Status) -> dict[str, Any]:
    """The fields that clients of the distance protocol expect in every state: ``PowStatus``."""
    spec, stats = status.spec, status.stats
    winners: Sequence[Winner] | None = []
    r_target: float | None = None
    if spec is None or stats is None or spec.target is None:
        stats = _NOTHING
    else:
        r_target = spec.target.r_target
        try:
            # Older ones are in GET /results.
            winners = await node.outbox.winners(spec.round_id, 100)
        except OutboxUnavailable:
            winners = None
    return PowStatus(
        state=status.state,
        valid_nonces=None if winners is None else [winner.nonce for winner in winners],
        valid_distances=None if winners is None else [winner.distance for winner in winners],
        total_checked=stats.total_processed,
        total_valid=stats.total_found,
        elapsed_seconds=stats.elapsed_s,
        rate_per_second=stats.nonces_per_second,
        r_target=r_target,
    ).model_dump(mode="json")


async def read_receipts(node: Node) -> tuple[ReceiptGauges | None, str | None]:
    """The counts of receipts, or None and the reason; no reason if answers get none."""
    if node.receipts is None:
        return None, None
    return await answer_of_outbox(node.receipts.gauges())


async def read_engine(node: Node) -> tuple[EngineGauges | None, str | None]:
    """The engine's newest gauges, or None and why not; an engine that hangs is not waited for."""
    asked = asyncio.ensure_future(node.manager.engine_gauges())
    try:
        while not asked.done():
            if (reason := node.stall) is not None:
                return None, reason
            await asyncio.wait({asked}, timeout=0.25)
        engine = asked.result()
    except EngineFault as error:
        return None, node.stall or str(error)
    except EngineGone as error:
        return None, str(error)
    finally:
        asked.cancel()
    if engine.age_s and (reason := node.stall) is not None:
        return None, reason
    return engine, None


async def answer_of_outbox(call: Awaitable[T]) -> tuple[T | None, str | None]:
    """The result of a call to the outbox, or None and the reason why it has none."""
    try:
        async with asyncio.timeout(OUTBOX_ANSWER_S):
            return await call, None
    except TimeoutError:
        return None, f"the outbox did not answer within {OUTBOX_ANSWER_S:g} s"
    except OutboxUnavailable as error:
        return None, str(error)
