"""Builds a proof node: engine, outbox, callbacks, rounds, receipts, and limits of the routes."""

import importlib.metadata
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import torch

from proofserve.api.node import Deployment, Node
from proofserve.api.node_page import NodeHistory, with_dashboard
from proofserve.outbox.allowlist import UrlCheck
from proofserve.outbox.planning import CallbackPolicy
from proofserve.outbox.receipts import SqliteReceipts, signing_key
from proofserve.outbox.sender import CallbackSender, Outward
from proofserve.outbox.store import SqliteOutbox
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import SigningKey
from proofserve.rounds.errors import EngineFault, EngineGone, OutboxUnavailable
from proofserve.rounds.manager import RoundManager
from proofserve.rounds.ports import AnsweringEngine, ProofEngine
from proofserve.rounds.receipts import ReceiptService
from proofserve.rounds.records import EngineInfo, Limits, RoundSpec
from proofserve.rounds.state import Move
from proofserve.rounds.status import CoreLiveness
from proofserve.rounds.tasks import beside, delete_for_ever
from proofserve.settings.node import NodeSettings
from proofserve.wiring.access import CALLBACK_ALLOW, access_of, call_limits, outward_of
from proofserve.wiring.joining import joining_of

_logger = logging.getLogger(__name__)

# A warning about a callback URL, or ValueError if no callback may go there.
Check = Callable[[str], Awaitable[str | None]]

DAY_S = 86_400.0
# At the latest; more often where results or receipts are kept for less than four hours.
PRUNE_EVERY_S = 3600.0
# How long the id of a deleted receipt stays, so that no other answer gets a receipt under it.
IDS_KEPT_S = 30 * DAY_S

_CPU = torch.device("cpu")


def versions(**engine: str) -> dict[str, str]:
    return {"proofserve": importlib.metadata.version("proofserve"), **engine}


@asynccontextmanager
async def running_node(
    engine: ProofEngine,
    settings: NodeSettings,
    answers: AnsweringEngine | None = None,
    owned: Callable[[], Awaitable[None]] | None = None,
    liveness: Callable[[], Sequence[CoreLiveness]] = tuple,
) -> AsyncIterator[Node]:
    """A node that works until the context ends; it then stops its round and posts due callbacks.

    With ``answers`` its chat answers get receipts. ``owned`` is awaited when this process has the
    outbox, before anything uses the engine. ``liveness`` reads what the node shows of its cores.
    Raises OutboxInUse, OutboxUnavailable, and ValueError for settings that are not valid, and for a
    key file that cannot be used.
    """
    access, outward = access_of(settings), outward_of(settings, CALLBACK_ALLOW)
    async with await SqliteOutbox.open(settings.outbox) as outbox:
        key_file = settings.receipts_key_file or settings.outbox.with_suffix(".receipts.pem")
        key = signing_key(key_file) if settings.enabled else None
        if owned is not None:
            await owned()
        sender = CallbackSender(outbox, _policy(settings), outward=outward)
        manager = RoundManager(engine, outbox, _limits(settings))
        deployment = _deployment(engine.engine_info, settings, outward)
        keep_s = settings.outbox_keep_days * DAY_S
        prune = partial(_prune_results, outbox, keep_s)
        pruning = delete_for_ever(prune, keep_s, "delivered results", PRUNE_EVERY_S)
        receipts_made = receipts_of(answers, key, outbox.receipts, settings, deployment.check_url)
        async with (
            beside("callbacks", sender.run()),
            beside("pruning", pruning),
            receipts_made as receipts,
            beside("fleet", member.run()) if (member := joining_of(settings)) else nullcontext(),
        ):
            with suppress(EngineFault, EngineGone):
                await manager.engine_gauges()
            try:
                await _continue_round(manager, outbox, deployment, resume=settings.resume)
                limits = call_limits(settings)
                made = Node(deployment, manager, outbox, access, limits, receipts, key=key)
                membership = member.status if member else made.membership
                made = replace(made, liveness=liveness, membership=membership)
                history = NodeHistory(manager.status, lambda: made.stall)
                page = beside("dashboard", history.watch()) if settings.dashboard else nullcontext()
                async with page:
                    yield with_dashboard(made, history) if settings.dashboard else made
            finally:
                await manager.aclose()
                if receipts is not None:
                    await receipts.finish()
                await _flush(sender, outbox, settings.shutdown_flush_sec)


async def _prune_results(outbox: SqliteOutbox, keep_s: float) -> None:
    """Delete from the outbox what was delivered ``keep_s`` seconds ago."""
    deleted = await outbox.prune(keep_s)
    if deleted.results or deleted.callbacks:
        text = "deleted %d results and %d callbacks that were delivered long ago"
        _logger.info(text, deleted.results, deleted.callbacks)


async def _flush(sender: CallbackSender, outbox: SqliteOutbox, seconds: float) -> None:
    if await sender.drain(seconds):
        return
    with suppress(OutboxUnavailable):
        pending = (await outbox.gauges()).pending
        _logger.warning("%d callbacks stay in the outbox; the next start sends them", pending)


async def _continue_round(
    manager: RoundManager, outbox: SqliteOutbox, deployment: Deployment, resume: bool
) -> None:
    spec = await outbox.interrupted()
    if spec is None:
        return
    known = {"round_id": spec.round_id}
    reason = _mismatch(spec, deployment) if resume else "the server was started without --resume"
    if reason is None:
        await manager.configure(spec, Move.START)
        _logger.info("round %s continues", spec.round_id, extra=known)
    else:
        await outbox.close_round(spec.round_id)
        text = "round %s cannot continue and is closed: %s"
        _logger.warning(text, spec.round_id, reason, extra=known)


def _mismatch(spec: RoundSpec, deployment: Deployment) -> str | None:
    """Why this deployment would compute other results for the round; None if no reason is known."""
    if spec.target is None and deployment.scheme not in (None, spec.work.scheme.name):
        return f"it is of scheme {spec.work.scheme.name}, deployed is {deployment.scheme}"
    if spec.work.seq_len > deployment.engine_info.max_seq_len:
        return f"its seq_len {spec.work.seq_len} exceeds the model's context"
    try:
        # On the CPU, where this computes nothing yet.
        spec.work.scheme.for_block(spec.work.block, deployment.engine_info.facts, _CPU)
    except ProtocolError as error:
        return str(error)
    return None


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
    return Limits(
        max_queued_nonces=settings.max_queued_nonces,
        chunk_timeout_s=settings.generate_chunk_timeout_sec,
        result_ttl_s=settings.generate_result_ttl_sec,
    )


def _policy(settings: NodeSettings) -> CallbackPolicy:
    return CallbackPolicy(
        interval_s=settings.callback_interval_sec,
        max_artifacts=settings.callback_max_artifacts,
        max_retries=settings.callback_max_retries,
        max_concurrent=settings.callback_max_concurrent,
    )


@asynccontextmanager
async def receipts_of(
    answers: AnsweringEngine | None,
    key: SigningKey | None,
    storage: SqliteReceipts,
    settings: NodeSettings,
    check: Check,
) -> AsyncIterator[ReceiptService | None]:
    """Make receipts until the context ends; None without ``answers``. The caller finishes them.

    Raises ValueError for a URL to which no callback may go.
    """
    if answers is None or key is None:
        yield None
        return
    url, warning = settings.receipts_callback, None
    if url is not None:
        try:
            url, warning = url.rstrip("/"), await check(url)
        except ValueError as error:
            raise ValueError(f"--poc-receipts-callback / POC_RECEIPTS_CALLBACK: {error}") from None
    if warning:
        _logger.warning("POC_RECEIPTS_CALLBACK: %s", warning)
    service = ReceiptService(answers, storage, key, url)
    keep_s = settings.receipts_keep_days * DAY_S
    prune = partial(storage.prune, keep_s, IDS_KEPT_S)
    deletion = delete_for_ever(prune, keep_s, "receipts", PRUNE_EVERY_S)
    async with beside("receipts", service.run()), beside("receipts-pruning", deletion):
        yield service
