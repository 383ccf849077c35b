"""The body of a callback, in pieces that leave the database free in between (protocol B.7)."""

import json
import sqlite3
from dataclasses import dataclass
from functools import partial

from proofserve.outbox.database import Database
from proofserve.outbox.deliveries import Delivery, Span

# Rows turned to JSON in one go: a few milliseconds, so that a result never waits for a large body.
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class _Page:
    text: str
    last_seq: int


async def body(database: Database, delivery: Delivery) -> bytes:
    """The JSON to POST. Raises OutboxUnavailable."""
    if delivery.span is None:
        return await database.read(partial(_stored_body, delivery_id=delivery.id))
    span = delivery.span
    head, tail = await database.read(partial(_frame, span=span))
    pages = []
    after = span.first_seq - 1
    while page := await database.read(partial(_page, span=span, after=after)):
        pages.append(page.text)
        after = page.last_seq
    return f"{head}{','.join(pages)}{tail}".encode()


def _stored_body(connection: sqlite3.Connection, delivery_id: int) -> bytes:
    row = connection.execute("SELECT body FROM deliveries WHERE id = ?", (delivery_id,)).fetchone()
    text: str = row[0]
    return text.encode()


def _frame(connection: sqlite3.Connection, span: Span) -> tuple[str, str]:
    """The JSON before and after the artifacts."""
    key, block, height, node_id, width = connection.execute(
        "SELECT public_key, block_hash, block_height, node_id, width FROM rounds WHERE number = ?",
        (span.round_number,),
    ).fetchone()
    head = {"public_key": key, "block_hash": block, "block_height": height, "node_id": node_id}
    tail = {"encoding": {"dtype": "f16", "k_dim": width, "endian": "le"}}
    return f'{_dumps(head)[:-1]},"artifacts":[', f"],{_dumps(tail)[1:]}"


def _page(connection: sqlite3.Connection, span: Span, after: int) -> _Page | None:
    # The plus keeps SQLite off the index by nonce, which would sort the whole round each time.
    rows = connection.execute(
        "SELECT seq, nonce, value FROM results"
        " WHERE seq > ? AND seq <= ? AND +round = ? AND value IS NOT NULL ORDER BY seq LIMIT ?",
        (after, span.last_seq, span.round_number, _PAGE),
    ).fetchall()
    if not rows:
        return None
    artifacts = [{"nonce": nonce, "vector_b64": value} for _, nonce, value in rows]
    return _Page(_dumps(artifacts)[1:-1], rows[-1][0])


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
