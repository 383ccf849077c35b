"""Entries of logs of receipts as rows. Every function runs inside a transaction of the caller."""

import json
import sqlite3
from collections.abc import Sequence

from proofserve.protocol.receipts.signature import SignedEntry
from proofserve.wire.receipts import signed_entry_body

_ADD = """
    INSERT INTO log_entries VALUES (
        :public_key, :number, :hash, :body, :now,
        EXISTS (SELECT 1 FROM log_entries WHERE public_key = :public_key AND number = :number))
    ON CONFLICT DO NOTHING RETURNING fork
"""
_FORKS = "SELECT count(*) FROM log_entries WHERE fork = 1"


def add(
    connection: sqlite3.Connection, public_key: bytes, entries: Sequence[SignedEntry], now: float
) -> list[int]:
    """Store those of ``entries`` that are not there; ``now`` in seconds since the epoch.

    Returns the indices of entries that were stored beside another entry with their index.
    """
    forks = []
    for each in entries:
        row = {
            "public_key": public_key.hex(),
            "number": each.entry.index,
            "hash": each.entry.hash,
            "body": json.dumps(signed_entry_body(each)),
            "now": now,
        }
        if connection.execute(_ADD, row).fetchone() == (1,):
            forks.append(each.entry.index)
    return forks


def count_forks(connection: sqlite3.Connection) -> int:
    return int(connection.execute(_FORKS).fetchone()[0])
