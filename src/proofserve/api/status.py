"""What ``GET /status`` says: the truth about round, queue, outbox and engine."""

from dataclasses import asdict
from typing import Any

from proofserve.api.node import Node
from proofserve.rounds.errors import EngineFault, EngineGone, OutboxUnavailable
from proofserve.rounds.records import RoundSpec
from proofserve.rounds.status import Stats, Status

# Everything older is in GET /results.
NEWEST_WINNERS = 100


async def pow_status(node: Node) -> dict[str, Any]:
    """What the distance protocol says of its round (A.7, P.2.8): counts and the newest winners."""
    return await _distance_fields(node, node.manager.status())


async def stopped_body(node: Node) -> dict[str, Any]:
    """What ``POST /stop`` says: a word for the artifact protocol, more for the other one."""
    status = node.manager.status()
    word = {"status": status.state.value}
    if status.spec is not None and status.spec.target is None:
        return word
    return {**word, **await _distance_fields(node, status)}


async def status_body(node: Node) -> dict[str, Any]:
    """The answer. A part that cannot be read is null, with the reason beside it."""
    status = node.manager.status()
    return {
        "status": status.state.value,
        **await _distance_fields(node, status),
        "config": _config(status.spec) if status.spec else None,
        "stats": _stats(status.stats) if status.stats else None,
        "round_id": status.spec.round_id if status.spec else None,
        "scheme": node.deployment.scheme,
        "paused_reason": status.paused_reason,
        "error": status.error,
        "warning": node.url_warnings.get(status.spec.round_id) if status.spec else None,
        "queue": asdict(status.queue),
        **await _outbox(node),
        **await _engine(node),
    }


async def _distance_fields(node: Node, status: Status) -> dict[str, Any]:
    """The fields by which clients of the distance protocol know a node, whatever it does."""
    spec, stats = status.spec, status.stats
    fields: dict[str, Any] = {
        "state": status.state.value,
        "valid_nonces": [],
        "valid_distances": [],
        "total_checked": 0,
        "total_valid": 0,
        "elapsed_seconds": 0.0,
        "rate_per_second": 0.0,
        "r_target": None,
    }
    if spec is None or stats is None or spec.target is None:
        return fields
    try:
        winners = await node.outbox.winners(spec.round_id, NEWEST_WINNERS)
    except OutboxUnavailable:
        listed: dict[str, Any] = {"valid_nonces": None, "valid_distances": None}
    else:
        listed = {
            "valid_nonces": [winner.nonce for winner in winners],
            "valid_distances": [winner.distance for winner in winners],
        }
    return {
        **fields,
        **listed,
        "total_checked": stats.processed,
        "total_valid": stats.found,
        "elapsed_seconds": stats.elapsed_s,
        "rate_per_second": stats.rate,
        "r_target": spec.target.r_target,
    }


def _config(spec: RoundSpec) -> dict[str, Any]:
    lane = spec.lane
    config: dict[str, Any] = {
        "block_hash": spec.work.block_hash,
        "block_height": spec.block_height,
        "public_key": spec.work.public_key,
        "node_id": lane.node_id if lane else None,
        "node_count": lane.node_count if lane else None,
        "group_id": lane.group_id if lane else None,
        "n_groups": lane.n_groups if lane else None,
        "seq_len": spec.work.seq_len,
    }
    if spec.target is None:
        return {**config, "k_dim": spec.work.scheme.width}
    return {**config, **asdict(spec.target), "scheme": spec.work.scheme.to_wire()}


def _stats(stats: Stats) -> dict[str, Any]:
    return {
        "total_processed": stats.processed,
        "total_found": stats.found,
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
