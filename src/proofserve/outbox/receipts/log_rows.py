"""The log of receipts as rows. Every function runs inside a transaction of the caller."""

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from proofserve.outbox import deliveries
from proofserve.protocol.receipts.log import LogEntry, first_entry, inclusions
from proofserve.protocol.receipts.signature import SignedEntry
from proofserve.wire.paths import LOGGED
from proofserve.wire.receipts import signed_entry_body

# Receipts of one entry: storing their paths takes some ten milliseconds.
MOST_IN_ENTRY = 4096
# Entries of one callback, about 300 bytes each.
MOST_IN_CALLBACK = 1000

_COLUMNS = "number, time_ms, count, root, previous, signature"
_NEWEST = f"SELECT {_COLUMNS} FROM log_entries ORDER BY number DESC LIMIT 1"  # noqa: S608
_AFTER = f"SELECT {_COLUMNS} FROM log_entries WHERE number > ? ORDER BY number LIMIT ?"  # noqa: S608
_UNLOGGED = """
    SELECT number, digest, created_ms FROM receipts WHERE entry IS NULL ORDER BY number LIMIT ?
"""
_PENDING = "SELECT 1 FROM deliveries WHERE state = 'pending' AND endpoint = ? LIMIT 1"


def add_entry(
    connection: sqlite3.Connection, sign: Callable[[bytes], bytes], now_ms: int
) -> SignedEntry | None:
    """Add the next entry, over the oldest receipts without one; None if all have one.

    Times of entries never fall, and are not before their receipts', whatever the clock does.
    """
    rows = connection.execute(_UNLOGGED, (MOST_IN_ENTRY,)).fetchall()
    if not rows:
        return None
    numbers, digests, created = zip(*rows, strict=True)
    newest = connection.execute(_NEWEST).fetchone()
    if newest is None:
        entry = first_entry(digests, max(now_ms, *created))
    else:
        before = _signed(newest).entry
        entry = before.followed_by(digests, max(now_ms, before.time_ms, *created))
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


def after(connection: sqlite3.Connection, index: int, limit: int) -> list[SignedEntry]:
    return [_signed(row) for row in connection.execute(_AFTER, (index, limit))]


def cut_callback(connection: sqlite3.Connection, url: str, public_key: bytes, now: float) -> bool:
    """Queue a callback with the entries that are in none yet, unless one is undelivered.

    So a target that does not answer has one callback waiting, however long the log becomes.
    """
    if connection.execute(_PENDING, (LOGGED,)).fetchone() is not None:
        return False
    (posted,) = connection.execute("SELECT posted FROM receipt_totals").fetchone()
    entries = after(connection, posted, MOST_IN_CALLBACK)
    if not entries:
        return False
    body = {
        "public_key": public_key.hex(),
        "entries": [signed_entry_body(each) for each in entries],
    }
    deliveries.add_job(connection, LOGGED, url, body, now)
    newest = entries[-1].entry.index
    connection.execute("UPDATE receipt_totals SET posted = ?", (newest,))
    return True


def _signed(row: Sequence[Any]) -> SignedEntry:
    *fields, signature = row
    return SignedEntry(LogEntry(*fields), signature)
