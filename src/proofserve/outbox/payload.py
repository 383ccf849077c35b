"""The body of a callback, read in pieces between other transactions (protocol A.8, B.7)."""

import json
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from proofserve.outbox.committed import batches
from proofserve.outbox.database import Database
from proofserve.outbox.deliveries import Delivery, Span
from proofserve.wire.commitments import root_record
from proofserve.wire.records import artifact_record, encoding_of

# Rows in one transaction: a few milliseconds, so that new results need not wait for a large body.
_PAGE = 4096

_HEAD = """
    SELECT public_key, block_hash, block_height, node_id, width, r_target, commits_roots,
           round_id, node_count, group_id, n_groups, json_extract(scheme, '$.name') AS scheme,
           seq_len
    FROM rounds WHERE number = ?
"""
# The plus keeps SQLite off the index by nonce, which would sort the whole round each time.
_ROWS = """
    SELECT seq, nonce, value FROM results
    WHERE seq > ? AND seq <= ? AND +round = ? AND value IS NOT NULL ORDER BY seq LIMIT ?
"""

# The next rows after a seq, of one kind of round: the last seq of them, and their lists by name as
# JSON without the brackets.
_Page = Callable[[sqlite3.Connection, Span, int], tuple[int, dict[str, str]] | None]


async def body(database: Database, delivery: Delivery) -> bytes:
    span = delivery.span
    if span is None:
        return await database.read(_stored_body, delivery.id)
    head, tail, read_page = await database.read(_parts, span)
    pages: list[dict[str, str]] = []
    after = span.first_seq - 1
    while page := await database.read(read_page, span, after):
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


def _parts(
    connection: sqlite3.Connection, span: Span
) -> tuple[dict[str, Any], dict[str, Any], _Page]:
    """The members of the body before and after its lists (B.7 or A.8), and what reads the lists."""
    cursor = connection.cursor()
    cursor.row_factory = sqlite3.Row
    row = cursor.execute(_HEAD, (span.round_number,)).fetchone()

    def members(*names: str) -> dict[str, Any]:
        return {name: row[name] for name in names}

    head = members("public_key", "block_hash", "block_height", "node_id")
    if row["r_target"] is not None:
        return head, members("r_target"), _winners
    encoding = {"encoding": encoding_of(row["width"])}
    if not row["commits_roots"]:
        return head, encoding, _artifacts
    head |= members("node_count", "group_id", "n_groups", "round_id")
    return head, members("scheme") | encoding | {"params": members("seq_len")}, _roots


def _winners(
    connection: sqlite3.Connection, span: Span, after: int
) -> tuple[int, dict[str, str]] | None:
    if not (rows := _rows(connection, span, after)):
        return None
    seqs, nonces, distances = zip(*rows, strict=True)
    # A stored distance is the JSON of a number already.
    return seqs[-1], {"nonces": _dumps(nonces)[1:-1], "dist": ",".join(distances)}


def _artifacts(
    connection: sqlite3.Connection, span: Span, after: int
) -> tuple[int, dict[str, str]] | None:
    if not (rows := _rows(connection, span, after)):
        return None
    records = [artifact_record(nonce, value) for _, nonce, value in rows]
    return rows[-1][0], {"artifacts": _dumps(records)[1:-1]}


def _roots(
    connection: sqlite3.Connection, span: Span, after: int
) -> tuple[int, dict[str, str]] | None:
    page = batches.page(connection, span.round_number, after, span.last_seq, _PAGE)
    if page is None:
        return None
    return page[0], {"roots": _dumps([root_record(batch) for batch in page[1]])[1:-1]}


def _rows(connection: sqlite3.Connection, span: Span, after: int) -> Sequence[tuple[int, int, str]]:
    place = (after, span.last_seq, span.round_number, _PAGE)
    return connection.execute(_ROWS, place).fetchall()


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
