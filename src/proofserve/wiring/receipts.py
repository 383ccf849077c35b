"""Receipts of a node: the key, the service and the deletion, from the settings."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from proofserve.outbox.receipts import SqliteReceipts, signing_key
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.rounds.receipts import ReceiptService, ReceiptSource
from proofserve.rounds.tasks import beside
from proofserve.settings.node import NodeSettings

# A warning about a callback URL, or ValueError if no callback may go there.
Check = Callable[[str], Awaitable[str | None]]

_logger = logging.getLogger(__name__)

DAY_S = 86_400.0
# At the latest; more often where results or receipts are kept for less than four hours.
PRUNE_EVERY_S = 3600.0
# How long the id of a deleted receipt stays, so that no other answer gets a receipt under it.
IDS_KEPT_S = 30 * DAY_S


def key_file_of(settings: NodeSettings) -> Path:
    return settings.receipts_key_file or settings.outbox.with_suffix(".receipts.pem")


@asynccontextmanager
async def receipts_of(
    source: ReceiptSource | None, storage: SqliteReceipts, settings: NodeSettings, check: Check
) -> AsyncIterator[ReceiptService | None]:
    """Make receipts until the context ends; None without a ``source``. The caller finishes them.

    Raises ValueError for a key file that cannot be used and a URL to which no callback may go.
    """
    if source is None:
        yield None
        return
    url = await _checked(settings.receipts_callback, check)
    service = ReceiptService(source, storage, signing_key(key_file_of(settings)), url)
    deletion = _prune_for_ever(storage, settings.receipts_keep_days * DAY_S)
    async with beside("receipts", service.run()), beside("receipts-pruning", deletion):
        yield service


async def _checked(url: str | None, check: Check) -> str | None:
    if url is None:
        return None
    try:
        warning = await check(url)
    except ValueError as error:
        raise ValueError(f"--poc-receipts-callback / POC_RECEIPTS_CALLBACK: {error}") from None
    if warning:
        _logger.warning("POC_RECEIPTS_CALLBACK: %s", warning)
    return url.rstrip("/")


async def _prune_for_ever(storage: SqliteReceipts, keep_s: float) -> None:
    """Delete receipts ``keep_s`` seconds after they were stored; none if that is 0."""
    while keep_s:
        try:
            await storage.prune(keep_s, IDS_KEPT_S)
        except OutboxUnavailable as error:
            _logger.warning("receipts are deleted later: %s", error)
        await asyncio.sleep(min(PRUNE_EVERY_S, keep_s / 4))
