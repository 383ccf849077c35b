"""The body of a callback, in pieces that leave the database free in between (protocol A.8, B.7)."""

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from proofserve.outbox.database import Database
from proofserve.outbox.deliveries import Delivery, Span
from proofserve.wire.records import artifact_record, encoding_of

# Rows turned to JSON in one go: a few milliseconds, so that a result never waits for a large body.
_PAGE = 4096


# (nonce, value) as stored.
_Row = tuple[int, str]
# The JSON of a body's lists, each without its brackets.
_Lists = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Page:
    lists: _Lists
    last_seq: int


@dataclass(frozen=True, slots=True)
class _Frame:
    """A body without the contents of its lists: ``names`` are their keys."""

    head: Mapping[str, Any]
    names: tuple[str, ...]
    tail: Mapping[str, Any]

    def around(self, pages: Sequence[_Page]) -> str:
        joined = zip(*(page.lists for page in pages), strict=True)
        lists = zip(self.names, joined, strict=True)
        members = (
            _dumps(self.head)[1:-1],
            *(f'"{name}":[{",".join(parts)}]' for name, parts in lists),
            _dumps(self.tail)[1:-1],
        )
        return f"{{{','.join(members)}}}"


async def body(database: Database, delivery: Delivery) -> bytes:
    """The JSON to POST. Raises OutboxUnavailable."""
    if delivery.span is None:
        return await database.read(partial(_stored_body, delivery_id=delivery.id))
    span = delivery.span
    frame, lists_of = await database.read(partial(_frame, span=span))
    pages = []
    after = span.first_seq - 1
    while page := await database.read(partial(_page, lists_of=lists_of, span=span, after=after)):
        pages.append(page)
        after = page.last_seq
    return frame.around(pages).encode()


def _stored_body(connection: sqlite3.Connection, delivery_id: int) -> bytes:
    row = connection.execute("SELECT body FROM deliveries WHERE id = ?", (delivery_id,)).fetchone()
    text: str = row[0]
    return text.encode()


def _frame(
    connection: sqlite3.Connection, span: Span
) -> tuple[_Frame, Callable[[Sequence[_Row]], _Lists]]:
    """What surrounds the results of a round (B.7 or A.8), and what turns rows into its lists."""
    key, block, height, node_id, width, r_target = connection.execute(
        "SELECT public_key, block_hash, block_height, node_id, width, r_target FROM rounds"
        " WHERE number = ?",
        (span.round_number,),
    ).fetchone()
    head = {"public_key": key, "block_hash": block, "block_height": height, "node_id": node_id}
    if r_target is not None:
        return _Frame(head, ("nonces", "dist"), {"r_target": r_target}), _winners
    tail = {"encoding": encoding_of(width)}
    return _Frame(head, ("artifacts",), tail), _artifacts


def _artifacts(rows: Sequence[_Row]) -> _Lists:
    return (_dumps([artifact_record(nonce, text) for nonce, text in rows])[1:-1],)


def _winners(rows: Sequence[_Row]) -> _Lists:
    nonces, distances = zip(*rows, strict=True)
    # A stored distance is the JSON of a number already.
    return _dumps(nonces)[1:-1], ",".join(distances)


def _page(
    connection: sqlite3.Connection,
    lists_of: Callable[[Sequence[_Row]], _Lists],
    span: Span,
    after: int,
) -> _Page | None:
    # The plus keeps SQLite off the index by nonce, which would sort the whole round each time.
    rows = connection.execute(
        "SELECT seq, nonce, value FROM results"
        " WHERE seq > ? AND seq <= ? AND +round = ? AND value IS NOT NULL ORDER BY seq LIMIT ?",
        (after, span.last_seq, span.round_number, _PAGE),
    ).fetchall()
    if not rows:
        return None
    return _Page(lists_of([(nonce, value) for _, nonce, value in rows]), rows[-1][0])


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
