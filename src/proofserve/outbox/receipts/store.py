"""Receipts and their log in the outbox's SQLite file."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from proofserve.outbox import pruning
from proofserve.outbox.database import Database
from proofserve.outbox.receipts import log_rows, rows
from proofserve.outbox.receipts.rows import NewReceipt
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.signature import SignedEntry, SignedReceipt, SigningKey
from proofserve.rounds.ports import ReceiptStorage
from proofserve.rounds.receipts.status import INVALID, ReceiptGauges
from proofserve.wire.receipts import receipt_of

_log = logging.getLogger(__name__)


class SqliteReceipts(ReceiptStorage):
    """All methods raise OutboxUnavailable if the disk fails; nothing is changed then.

    ``news`` is set when the sender of callbacks may have work. ``clock`` gives wall-clock seconds.
    """

    def __init__(self, database: Database, clock: Callable[[], float], news: asyncio.Event) -> None:
        self._database = database
        self._clock = clock
        self._news = news

    async def add(self, receipts: Sequence[SignedReceipt], without: Mapping[str, int]) -> int:
        """As the port. A receipt that no reader could parse is not stored, but counted."""
        made, invalid = await asyncio.to_thread(_new_receipts, receipts)
        counts = dict(without)
        if invalid:
            counts[INVALID] = counts.get(INVALID, 0) + invalid
        return await self._database.write(rows.add, made, counts, self._clock())

    async def log(self, key: SigningKey, url: str | None) -> SignedEntry | None:
        now = self._clock()
        made = await self._database.write(log_rows.add_entry, key.sign, int(now * 1000))
        if url is not None and await self._database.write(
            log_rows.cut_callback, url, key.public_key, now
        ):
            self._news.set()
        return made

    async def of_response(self, response_id: str) -> list[SignedReceipt | None]:
        return await self._database.read(rows.of_response, response_id)

    async def entries(self, after: int, limit: int) -> list[SignedEntry]:
        return await self._database.read(log_rows.after, after, max(0, limit))

    async def gauges(self) -> ReceiptGauges:
        return await self._database.read(rows.gauges)

    async def prune(self, older_than_s: float, forget_s: float) -> int:
        """Delete receipts stored more than ``older_than_s`` seconds ago.

        Their ids stay for ``forget_s`` seconds more. Returns the number of rows deleted. It deletes
        in steps of some milliseconds, with pauses for other transactions.
        """
        before = self._clock() - older_than_s
        step = partial(rows.prune, bodies_before=before, rows_before=before - forget_s)
        deleted = 0
        while found := await self._database.write(step):
            deleted += found
            await asyncio.sleep(pruning.PAUSE_S)
        while await self._database.write(pruning.shrink):  # noqa: ASYNC110 - as in the outbox
            await asyncio.sleep(pruning.PAUSE_S)
        return deleted


def _new_receipts(receipts: Sequence[SignedReceipt]) -> tuple[list[NewReceipt], int]:
    """The receipts to store, and how many a strict reader would refuse."""
    made = []
    for signed in receipts:
        receipt = signed.receipt
        try:
            body = json.dumps(receipt.to_wire(), separators=(",", ":"), allow_nan=False)
            # Not equal: a number of another type would read back as another text, and digest.
            if receipt_of(json.loads(body)).digest != receipt.digest:
                raise ProtocolError("sampling", "has a number of a wrong type")
        except ValueError as error:
            _log.warning("answer %r gets no receipt: %s", receipt.response_id, error)
            continue
        made.append(NewReceipt(signed, receipt.digest, body))
    return made, len(receipts) - len(made)
