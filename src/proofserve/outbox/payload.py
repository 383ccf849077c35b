"""The body of a callback, read in pieces between other transactions (protocol A.8, B.7)."""

import json
import sqlite3
from typing import Any

from proofserve.outbox.database import Database
from proofserve.outbox.deliveries import Delivery, Span
from proofserve.wire.records import artifact_record, encoding_of

# Rows in one transaction: a few milliseconds, so that new results need not wait for a large body.
_PAGE = 4096

_HEAD = """
    SELECT public_key, block_hash, block_height, node_id, width, r_target FROM rounds
    WHERE number = ?
"""
# The plus keeps SQLite off the index by nonce, which would sort the whole round each time.
_ROWS = """
    SELECT seq, nonce, value FROM results
    WHERE seq > ? AND seq <= ? AND +round = ? AND value IS NOT NULL ORDER BY seq LIMIT ?
"""


async def body(database: Database, delivery: Delivery) -> bytes:
    span = delivery.span
    if span is None:
        return await database.read(_stored_body, delivery.id)
    head, tail = await database.read(_head_and_tail, span)
    pages: list[dict[str, str]] = []
    after = span.first_seq - 1
    while page := await database.read(_page, span, "r_target" in tail, after):
        after, lists = page
        pages.append(lists)
    members = [_dumps(head)[1:-1]]
    members += [f'"{name}":[{",".join(page[name] for page in pages)}]' for name in pages[0]]
    members.append(_dumps(tail)[1:-1])
    return f"{{{','.join(members)}}}".encode()


def _stored_body(connection: sqlite3.Connection, delivery_id: int) -> bytes:
    row = connection.execute("SELECT body FROM deliveries WHERE id = ?", (delivery_id,)).fetchone()
    text: str = row[0]
    return text.encode()


def _head_and_tail(
    connection: sqlite3.Connection, span: Span
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The members of the body before and after its lists of results (B.7 or A.8)."""
    row = connection.execute(_HEAD, (span.round_number,)).fetchone()
    key, block, height, node_id, width, r_target = row
    head = {"public_key": key, "block_hash": block, "block_height": height, "node_id": node_id}
    return head, {"encoding": encoding_of(width)} if r_target is None else {"r_target": r_target}


def _page(
    connection: sqlite3.Connection, span: Span, of_distance: bool, after: int
) -> tuple[int, dict[str, str]] | None:
    """The last seq of the next rows, and their lists by name as JSON without the brackets."""
    place = (after, span.last_seq, span.round_number, _PAGE)
    rows = connection.execute(_ROWS, place).fetchall()
    if not rows:
        return None
    seqs, nonces, values = zip(*rows, strict=True)
    if of_distance:
        # A stored distance is the JSON of a number already.
        return seqs[-1], {"nonces": _dumps(nonces)[1:-1], "dist": ",".join(values)}
    records = [artifact_record(nonce, value) for nonce, value in zip(nonces, values, strict=True)]
    return seqs[-1], {"artifacts": _dumps(records)[1:-1]}


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
