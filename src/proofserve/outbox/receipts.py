"""Receipts of chat answers and their log, in the outbox's file, and the key that signs them."""

import asyncio
import json
import logging
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from proofserve.outbox import pruning
from proofserve.outbox.callbacks import SqliteCallbacks
from proofserve.outbox.database import Database, StorePart, reads
from proofserve.outbox.planning import callback_text
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import (
    Inclusion,
    LogEntry,
    Receipt,
    SignedEntry,
    SignedReceipt,
    SigningKey,
    inclusions,
    next_entry,
)
from proofserve.rounds.ports import NewReceipt, ReceiptStorage
from proofserve.rounds.status import INVALID, REPEATED_ID, ReceiptGauges
from proofserve.wire import LOGGED
from proofserve.wire.signed import receipt_of, signed_entry_body

_log = logging.getLogger(__name__)

# The most that one step deletes; a body has some tens of kilobytes.
_BODIES, _ROWS = 100, 1000

_OF_RESPONSE = """
    SELECT body, receipts.public_key, receipts.signature, place, path, log_entries.number, time_ms,
           count, root, previous, log_entries.signature
    FROM receipts LEFT JOIN receipt_bodies USING (number)
                  LEFT JOIN log_entries ON log_entries.number = entry
    WHERE response_id = ? ORDER BY choice
"""
# Receipts of one entry: storing their paths takes some ten milliseconds.
MOST_IN_ENTRY = 4096
# Entries of one callback, about 300 bytes each.
MOST_IN_CALLBACK = 1000


class SqliteReceipts(StorePart[Database], ReceiptStorage):
    async def add(self, receipts: Sequence[NewReceipt], without: Mapping[str, int]) -> int:
        """As the port. A receipt that no reader could parse is not stored, but counted."""
        made, invalid = await asyncio.to_thread(_bodies, receipts)
        counts = dict(without)
        if invalid:
            counts[INVALID] = counts.get(INVALID, 0) + invalid
        return await self.database.write(_add, made, counts, self.clock())

    async def log(self, key: SigningKey, url: str | None) -> SignedEntry | None:
        now = self.clock()
        made = await self.database.write(_add_entry, key.sign, int(now * 1000))
        if url is not None and await self.database.write(_cut_callback, url, key.public_key, now):
            self.news.set()
        return made

    @reads
    def of_response(self, connection: Connection, response_id: str) -> list[SignedReceipt | None]:
        return [_signed(row) for row in connection.execute(_OF_RESPONSE, (response_id,))]

    @reads
    def entries(self, connection: Connection, after: int, limit: int) -> list[SignedEntry]:
        return _entries(connection, after, max(0, limit))

    @reads
    def gauges(self, connection: Connection) -> ReceiptGauges:
        without = dict(connection.execute("SELECT reason, count FROM answers_without_receipt"))
        stored, kept, entries, unlogged = connection.execute(_GAUGES).fetchone()
        return ReceiptGauges(stored, kept, entries, unlogged, without)

    async def prune(self, older_than_s: float, forget_s: float) -> int:
        """Delete receipts stored more than ``older_than_s`` seconds ago.

        Their ids stay for ``forget_s`` seconds more. Returns the number of rows deleted. It deletes
        in steps of some milliseconds, with pauses for other transactions.
        """
        before = self.clock() - older_than_s
        step = partial(_prune, bodies_before=before, rows_before=before - forget_s)
        deleted = await self.database.delete(step)
        await self.database.delete(pruning.shrink)
        return deleted


# -- receipts --------------------------------------------------------------------------------------

_HASH = 32
_ADD_RECEIPT = """
    INSERT INTO receipts (response_id, choice, stored_at, created_ms, digest, signature, public_key)
    VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING number
"""
_COUNT = """
    INSERT INTO answers_without_receipt VALUES (?, ?)
    ON CONFLICT DO UPDATE SET count = count + excluded.count
"""
_GAUGES = """
    SELECT stored, stored - deleted, (SELECT coalesce(max(number) + 1, 0) FROM log_entries),
           (SELECT count(*) FROM receipts WHERE entry IS NULL)
    FROM receipt_totals
"""
_DELETE_BODIES = """
    DELETE FROM receipt_bodies WHERE number IN (
        SELECT number FROM receipt_bodies WHERE stored_at < ? ORDER BY stored_at LIMIT ?)
"""
# A receipt is never forgotten before the log has it.
_DELETE_ROWS = """
    DELETE FROM receipts WHERE number IN (
        SELECT number FROM receipts
        WHERE stored_at < ? AND entry IS NOT NULL
          AND NOT EXISTS (SELECT 1 FROM receipt_bodies WHERE number = receipts.number)
        ORDER BY stored_at LIMIT ?)
"""


def _bodies(receipts: Sequence[NewReceipt]) -> tuple[list[tuple[NewReceipt, str]], int]:
    """The receipts to store with their JSON, and how many a strict reader would refuse."""
    made = []
    for new in receipts:
        receipt = new[0].receipt
        try:
            made.append((new, _readable(receipt)))
        except ValueError as error:
            _log.warning("answer %r gets no receipt: %s", receipt.response_id, error)
    return made, len(receipts) - len(made)


def _readable(receipt: Receipt) -> str:
    """The JSON of ``receipt``. Raises ValueError if a reader would get another receipt from it."""
    body = json.dumps(receipt.to_wire(), separators=(",", ":"), allow_nan=False)
    read = receipt_of(json.loads(body))
    # As texts: 1 equals 1.0, but has another digest.
    if read != receipt or str(read.sampling) != str(receipt.sampling):
        raise ProtocolError("sampling", "has a number of a wrong type")
    return body


def _add(
    connection: Connection,
    receipts: Sequence[tuple[NewReceipt, str]],
    without: Mapping[str, int],
    now: float,
) -> int:
    """Store ``receipts``, and count answers without one by reason. Returns how many were stored."""
    stored = sum(_add_one(connection, *each, now) for each in receipts)
    connection.execute("UPDATE receipt_totals SET stored = stored + ?", (stored,))
    connection.executemany(_COUNT, list(without.items()))
    return stored


def _add_one(connection: Connection, new: NewReceipt, body: str, now: float) -> bool:
    signed, digest = new
    receipt = signed.receipt
    place = (receipt.response_id, receipt.choice)
    proof = (receipt.created_ms, digest, signed.signature, signed.public_key)
    row = connection.execute(_ADD_RECEIPT, (*place, now, *proof)).fetchone()
    if row is None:
        known = connection.execute(
            "SELECT digest FROM receipts WHERE response_id = ? AND choice = ?", place
        ).fetchone()
        if known[0] != digest:
            connection.execute(_COUNT, (REPEATED_ID, 1))
        return False
    connection.execute("INSERT INTO receipt_bodies VALUES (?, ?, ?)", (row[0], now, body))
    return True


def _signed(row: Sequence[Any]) -> SignedReceipt | None:
    body, public_key, signature, place, path, *fields, entry_signature = row
    if body is None:
        return None
    receipt = receipt_of(json.loads(body))
    if place is None:
        return SignedReceipt(receipt, public_key, signature)
    way = tuple(path[start : start + _HASH] for start in range(0, len(path), _HASH))
    inclusion = Inclusion(LogEntry(*fields), place, way)
    return SignedReceipt(receipt, public_key, signature, inclusion, entry_signature)


def _prune(connection: Connection, bodies_before: float, rows_before: float) -> int:
    """Delete some receipts stored before ``bodies_before``, and ids before ``rows_before``.

    Times are wall-clock seconds. Returns the number of rows deleted, 0 if nothing was left.
    """
    bodies = connection.execute(_DELETE_BODIES, (bodies_before, _BODIES)).rowcount
    connection.execute("UPDATE receipt_totals SET deleted = deleted + ?", (bodies,))
    return bodies or connection.execute(_DELETE_ROWS, (rows_before, _ROWS)).rowcount


# -- their log -------------------------------------------------------------------------------------

_ENTRY = "number, time_ms, count, root, previous, signature"
_NEWEST_ENTRY = f"SELECT {_ENTRY} FROM log_entries ORDER BY number DESC LIMIT 1"  # noqa: S608
_ENTRIES_AFTER = f"SELECT {_ENTRY} FROM log_entries WHERE number > ? ORDER BY number LIMIT ?"  # noqa: S608
_UNLOGGED = """
    SELECT number, digest, created_ms FROM receipts WHERE entry IS NULL ORDER BY number LIMIT ?
"""
_PENDING = "SELECT 1 FROM deliveries WHERE state = 'pending' AND endpoint = ? LIMIT 1"


def _add_entry(
    connection: Connection, sign: Callable[[bytes], bytes], now_ms: int
) -> SignedEntry | None:
    """Add an entry over the oldest receipts without one, if any. Times of entries never fall."""
    rows = connection.execute(_UNLOGGED, (MOST_IN_ENTRY,)).fetchall()
    if not rows:
        return None
    numbers, digests, created = zip(*rows, strict=True)
    newest = connection.execute(_NEWEST_ENTRY).fetchone()
    before = None if newest is None else _signed_entry(newest).entry
    time_ms = max(now_ms, before.time_ms if before else 0, *created)
    entry = next_entry(before, digests, time_ms)
    signature = sign(entry.hash)
    values = (entry.index, entry.time_ms, entry.count, entry.root, entry.previous, signature)
    connection.execute("INSERT INTO log_entries VALUES (?, ?, ?, ?, ?, ?)", values)
    connection.executemany(
        "UPDATE receipts SET entry = ?, place = ?, path = ? WHERE number = ?",
        [
            (entry.index, found.index, b"".join(found.path), number)
            for number, found in zip(numbers, inclusions(entry, digests), strict=True)
        ],
    )
    return SignedEntry(entry, signature)


def _entries(connection: Connection, index: int, limit: int) -> list[SignedEntry]:
    return [_signed_entry(row) for row in connection.execute(_ENTRIES_AFTER, (index, limit))]


def _cut_callback(connection: Connection, url: str, public_key: bytes, now: float) -> bool:
    """Queue the entries that are in no callback yet, unless one waits: at most one does."""
    if connection.execute(_PENDING, (LOGGED,)).fetchone() is not None:
        return False
    (posted,) = connection.execute("SELECT posted FROM receipt_totals").fetchone()
    entries = _entries(connection, posted, MOST_IN_CALLBACK)
    if not entries:
        return False
    body = {
        "public_key": public_key.hex(),
        "entries": [signed_entry_body(each) for each in entries],
    }
    SqliteCallbacks.add(connection, LOGGED, url, now, callback_text(LOGGED, body))
    newest = entries[-1].entry.index
    connection.execute("UPDATE receipt_totals SET posted = ?", (newest,))
    return True


def _signed_entry(row: Sequence[Any]) -> SignedEntry:
    *fields, signature = row
    return SignedEntry(LogEntry(*fields), signature)


# -- the key ---------------------------------------------------------------------------------------

_OWNER_ONLY = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def signing_key(path: Path, setting: str = "POC_RECEIPTS_KEY_FILE") -> SigningKey:
    """The key in ``path``, which ``setting`` names; a new one, stored there, if there is none.

    Raises ValueError for a file that other users may read or that has no such key, and if it cannot
    be read or made.
    """
    try:
        return _read(path) if path.exists() else _make(path)
    except ProtocolError as error:
        raise ValueError(
            f"the node's key file {path} {error.message}: name another file with"
            f" {setting}, or move this one away and a new key is made"
        ) from error
    except OSError as error:
        raise ValueError(f"the node's key file {path}: {error.strerror}") from error


def _read(path: Path) -> SigningKey:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS:
        raise ValueError(
            f"other users may use the node's key file {path} (mode {mode:04o}): run"
            f" `chmod 600 {path}`; if another user may have read it, move it away and a new key"
            " is made"
        )
    return SigningKey.from_pem(path.read_bytes())


def _make(path: Path) -> SigningKey:
    key = SigningKey.new()
    # Under another name until it is complete: a server that was killed here left half a key.
    begun = path.with_name(f"{path.name}.new")
    descriptor = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _OWNER_ONLY)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), _OWNER_ONLY)
        file.write(key.to_pem())
        file.flush()
        os.fsync(file.fileno())
    begun.rename(path)
    shown = key.public_key.hex()
    _log.info("made the key that signs answers and receipts: %s, public key %s", path, shown)
    return key
