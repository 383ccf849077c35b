"""Puts a proof node together: engine, outbox, sender, rounds, and what the routes check against."""

import asyncio
import importlib.metadata
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from proofserve.api.node import Deployment, Node, Rates, Waits
from proofserve.outbox.post import Outward
from proofserve.outbox.schedule import CallbackPolicy
from proofserve.outbox.sender import CallbackSender
from proofserve.outbox.store import SqliteOutbox
from proofserve.outbox.transport import UrlCheck
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.rounds.limits import JobLimits, Limits
from proofserve.rounds.manager import RoundManager
from proofserve.rounds.ports import ProofEngine
from proofserve.rounds.records import EngineInfo, RoundSpec
from proofserve.settings.node import NodeSettings
from proofserve.wiring.access import access_of, allowlist_of

_logger = logging.getLogger(__name__)


def versions(**engine: str) -> dict[str, str]:
    """Our own version beside the engine's."""
    return {"proofserve": importlib.metadata.version("proofserve"), **engine}


@asynccontextmanager
async def running_node(engine: ProofEngine, settings: NodeSettings) -> AsyncIterator[Node]:
    """A node that works until the context ends, and then leaves nothing undone that it can do.

    Raises NotAnOutbox, OutboxInUse or OutboxUnavailable if the outbox file cannot be used, and
    ValueError if the settings of keys or callbacks cannot.
    """
    access, outward = access_of(settings), _outward(settings)
    async with await SqliteOutbox.open(settings.outbox) as outbox:
        sender = CallbackSender(outbox, _policy(settings), outward=outward)
        sending = asyncio.create_task(sender.run(), name="proofserve-callbacks")
        sending.add_done_callback(_report)
        manager = RoundManager(engine, outbox, _limits(settings))
        deployment = _deployment(engine.engine_info, settings, outward)
        try:
            await _take_up(manager, outbox, deployment, resume=settings.resume)
            rates, waits = Rates(settings.requests_per_minute), Waits(settings.max_open_waits)
            yield Node(deployment, manager, outbox, access, rates, waits)
        finally:
            await manager.aclose()
            await _flush(sender, outbox, settings.shutdown_flush_sec)
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending


async def _flush(sender: CallbackSender, outbox: SqliteOutbox, seconds: float) -> None:
    """Hand over what is due, and say what is left for the next start."""
    if await sender.drain(seconds):
        return
    with suppress(OutboxUnavailable):
        left = (await outbox.gauges()).pending
        _logger.warning("%d callbacks stay in the outbox and go on with the next start", left)


async def _take_up(
    manager: RoundManager, outbox: SqliteOutbox, deployment: Deployment, resume: bool
) -> None:
    """Go on with the round that ran when the last server went down, or end it for good."""
    spec = await outbox.interrupted()
    if spec is None:
        return
    known = {"round_id": spec.round_id}
    if not resume:
        await outbox.close_round(spec.round_id)
        _logger.warning(
            "round %s was interrupted and is over (no --resume)", spec.round_id, extra=known
        )
    elif reason := _unfit(spec, deployment):
        await outbox.close_round(spec.round_id)
        _logger.error("round %s cannot go on and is over: %s", spec.round_id, reason, extra=known)
    else:
        await manager.start(spec)
        _logger.info("round %s goes on", spec.round_id, extra=known)


def _unfit(spec: RoundSpec, deployment: Deployment) -> str | None:
    """Why this deployment would give the round other numbers, as far as that can be known."""
    if spec.target is None and spec.work.scheme.name != deployment.scheme:
        return f"it is of scheme {spec.work.scheme.name}, deployed is {deployment.scheme}"
    if spec.work.seq_len > deployment.engine_info.max_seq_len:
        return f"its seq_len {spec.work.seq_len} exceeds the model's context"
    return None


def _report(sending: "asyncio.Task[None]") -> None:
    """The sender never ends by itself; if it does, results stay on disk and somebody must know."""
    if not sending.cancelled() and (error := sending.exception()) is not None:
        _logger.critical("callbacks have stopped; restart the server", exc_info=error)


def _outward(settings: NodeSettings) -> Outward:
    secret = settings.callback_secret
    key = None if secret is None else secret.get_secret_value().encode()
    return Outward(allowlist_of(settings), key)


def _deployment(engine_info: EngineInfo, settings: NodeSettings, outward: Outward) -> Deployment:
    return Deployment(
        engine_info=engine_info,
        enabled=settings.enabled,
        scheme=settings.scheme,
        seq_len=settings.seq_len,
        k_dim=settings.k_dim,
        default_batch_size=settings.batch_size_default,
        max_nonces=settings.max_queued_nonces,
        max_callbacks=settings.callback_queue_size,
        max_body_bytes=settings.max_body_bytes,
        check_url=UrlCheck(outward.allowlist, outward.resolve),
    )


def _limits(settings: NodeSettings) -> Limits:
    jobs = JobLimits(
        max_queued_nonces=settings.max_queued_nonces,
        chunk_timeout_s=settings.generate_chunk_timeout_sec,
        result_ttl_s=settings.generate_result_ttl_sec,
    )
    return Limits(jobs=jobs)


def _policy(settings: NodeSettings) -> CallbackPolicy:
    return CallbackPolicy(
        interval_s=settings.callback_interval_sec,
        max_artifacts=settings.callback_max_artifacts,
        max_retries=settings.callback_max_retries,
        max_concurrent=settings.callback_max_concurrent,
    )
