"""What ``GET /status`` says: the truth about round, queue, outbox and engine."""

from dataclasses import asdict
from typing import Any

from proofserve.api.node import Node
from proofserve.rounds.errors import EngineFault, EngineGone, OutboxUnavailable
from proofserve.rounds.records import RoundSpec, Stats


async def status_body(node: Node) -> dict[str, Any]:
    """The answer. A part that cannot be read is null, with the reason beside it."""
    status = node.manager.status()
    return {
        "status": status.state.value,
        "config": _config(status.spec) if status.spec else None,
        "stats": _stats(status.stats) if status.stats else None,
        "round_id": status.spec.round_id if status.spec else None,
        "scheme": node.deployment.scheme,
        "paused_reason": status.paused_reason,
        "error": status.error,
        "queue": asdict(status.queue),
        **await _outbox(node),
        **await _engine(node),
    }


def _config(spec: RoundSpec) -> dict[str, Any]:
    return {
        "block_hash": spec.work.block_hash,
        "block_height": spec.block_height,
        "public_key": spec.work.public_key,
        "node_id": spec.lane.node_id,
        "node_count": spec.lane.node_count,
        "group_id": spec.lane.group_id,
        "n_groups": spec.lane.n_groups,
        "seq_len": spec.work.seq_len,
        "k_dim": spec.work.scheme.width,
    }


def _stats(stats: Stats) -> dict[str, Any]:
    return {
        "total_processed": stats.processed,
        "nonces_per_second": stats.rate,
        "recent_nonces_per_second": stats.recent_rate,
        "failed": stats.failed,
        "elapsed_s": stats.elapsed_s,
        "deferred_calls": stats.deferred_calls,
        "deferred_s": stats.deferred_s,
        "faults": stats.faults,
    }


async def _outbox(node: Node) -> dict[str, Any]:
    try:
        return {"outbox": asdict(await node.outbox.gauges()), "outbox_error": None}
    except OutboxUnavailable as error:
        return {"outbox": None, "outbox_error": str(error)}


async def _engine(node: Node) -> dict[str, Any]:
    try:
        return {"engine": asdict(await node.manager.engine_gauges()), "engine_error": None}
    except (EngineFault, EngineGone) as error:
        return {"engine": None, "engine_error": str(error)}
