"""Receipts as rows. Every function runs inside a transaction of the caller."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from proofserve.protocol.receipts.log import Inclusion, LogEntry
from proofserve.protocol.receipts.signature import SignedReceipt
from proofserve.rounds.receipts.status import REPEATED_ID, ReceiptGauges
from proofserve.wire.receipts import receipt_of

_HASH = 32
# The most that one step deletes; a body has some tens of kilobytes.
_BODIES, _ROWS = 100, 1000

_ADD = """
    INSERT INTO receipts (response_id, choice, stored_at, created_ms, digest, signature, public_key)
    VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING number
"""
_COUNT = """
    INSERT INTO answers_without_receipt VALUES (?, ?)
    ON CONFLICT DO UPDATE SET count = count + excluded.count
"""
_OF_RESPONSE = """
    SELECT body, receipts.public_key, receipts.signature, place, path, log_entries.number, time_ms,
           count, root, previous, log_entries.signature
    FROM receipts LEFT JOIN receipt_bodies USING (number)
                  LEFT JOIN log_entries ON log_entries.number = entry
    WHERE response_id = ? ORDER BY choice
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


class NewReceipt(NamedTuple):
    """A receipt with its digest and its JSON, made before the transaction that stores it."""

    signed: SignedReceipt
    digest: bytes
    body: str


def add(
    connection: sqlite3.Connection,
    receipts: Sequence[NewReceipt],
    without: Mapping[str, int],
    now: float,
) -> int:
    """Store ``receipts`` and count the answers that have none, by reason.

    A receipt for a response and choice that have one is counted as ``repeated_id``, unless it is
    the same receipt once more. Returns how many were stored.
    """
    stored = sum(_add(connection, each, now) for each in receipts)
    connection.execute("UPDATE receipt_totals SET stored = stored + ?", (stored,))
    connection.executemany(_COUNT, list(without.items()))
    return stored


def _add(connection: sqlite3.Connection, new: NewReceipt, now: float) -> bool:
    receipt, signed = new.signed.receipt, new.signed
    place = (receipt.response_id, receipt.choice)
    proof = (receipt.created_ms, new.digest, signed.signature, signed.public_key)
    row = connection.execute(_ADD, (*place, now, *proof)).fetchone()
    if row is None:
        known = connection.execute(
            "SELECT digest FROM receipts WHERE response_id = ? AND choice = ?", place
        ).fetchone()
        if known[0] != new.digest:
            connection.execute(_COUNT, (REPEATED_ID, 1))
        return False
    connection.execute("INSERT INTO receipt_bodies VALUES (?, ?, ?)", (row[0], now, new.body))
    return True


def of_response(connection: sqlite3.Connection, response_id: str) -> list[SignedReceipt | None]:
    """One for each choice, in order; None for a deleted one."""
    return [_signed(row) for row in connection.execute(_OF_RESPONSE, (response_id,))]


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


def gauges(connection: sqlite3.Connection) -> ReceiptGauges:
    without = dict(connection.execute("SELECT reason, count FROM answers_without_receipt"))
    stored, kept, entries, unlogged = connection.execute(_GAUGES).fetchone()
    return ReceiptGauges(stored, kept, entries, unlogged, without)


def prune(connection: sqlite3.Connection, bodies_before: float, rows_before: float) -> int:
    """Delete some receipts stored before ``bodies_before``, and ids before ``rows_before``.

    Times are wall-clock seconds. Returns the number of rows deleted, 0 if nothing was left.
    """
    bodies = connection.execute(_DELETE_BODIES, (bodies_before, _BODIES)).rowcount
    connection.execute("UPDATE receipt_totals SET deleted = deleted + ?", (bodies,))
    return bodies or connection.execute(_DELETE_ROWS, (rows_before, _ROWS)).rowcount
