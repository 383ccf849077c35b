"""Callbacks in the outbox's SQLite file (A.8, B.7)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from sqlite3 import Connection, Cursor
from typing import Any

from proofserve.outbox.database import Database
from proofserve.outbox.planning import (
    CallbackStore,
    Delivery,
    Span,
    UncutRound,
    listed,
    listed_artifacts,
)
from proofserve.protocol.commitments import CommittedBatch
from proofserve.wire.records import ARTIFACT, ROOTS, root_record

# Rows in one transaction: a few milliseconds, so that new results need not wait for a large body.
_PAGE = 4096
# Of ended rounds and of winners (A.8) all results are due at once: a callback holds the winners of
# one batch, or of all batches that were stored while the previous callback was pending.
_UNCUT = """
    SELECT number, cut_seq + 1, last_seq, url, closed OR r_target IS NOT NULL, interval_from,
           commits_roots
    FROM rounds
    WHERE url IS NOT NULL AND last_seq > cut_seq AND NOT EXISTS (
        SELECT 1 FROM deliveries WHERE state = 'pending' AND round = rounds.number AND NOT revived)
"""
# The plus keeps SQLite from using the index by nonce, with which it would read the whole round.
_NTH_VALUE = """
    SELECT seq FROM results WHERE +round = ? AND seq BETWEEN ? AND ? AND value IS NOT NULL
    ORDER BY seq LIMIT 1 OFFSET ?
"""
_NTH_BATCH = """
    SELECT last_seq FROM batches WHERE round = ? AND last_seq BETWEEN ? AND ?
    ORDER BY last_seq LIMIT 1 OFFSET ?
"""
_NEXT_SEQUENCE = """
    SELECT coalesce(max(known), 0) + 1 FROM (
        SELECT max(sequence) AS known FROM deliveries WHERE url = :url
        UNION ALL SELECT last FROM sequences WHERE url = :url)
"""
_TARGETS = """
    SELECT url, min(next_attempt_at) AS due FROM deliveries INDEXED BY deliveries_waiting
    WHERE state = 'pending' GROUP BY url ORDER BY due, url
"""
_FIRST = """
    SELECT id, endpoint, idempotency_key, sequence, attempts, round_id, round, first_seq,
           deliveries.last_seq
    FROM deliveries LEFT JOIN rounds ON rounds.number = deliveries.round
    WHERE state = 'pending' AND deliveries.url = ? ORDER BY next_attempt_at, id LIMIT 1
"""
_DELETED_AND_REVIVED = """
    SELECT callbacks, (SELECT coalesce(sum(revived), 0) FROM deliveries WHERE revived > 0)
    FROM pruned
"""
# The plus keeps SQLite off the index by nonce, which would sort the whole round each time.
_ROWS = """
    SELECT seq, nonce, value FROM results
    WHERE +round = ? AND seq > ? AND seq <= ? AND value IS NOT NULL ORDER BY seq LIMIT ?
"""
_BATCHES = """
    SELECT last_seq, first_index, count, root, previous_root FROM batches
    WHERE round = ? AND last_seq > ? AND last_seq <= ? ORDER BY last_seq LIMIT ?
"""


class SqliteCallbacks(CallbackStore[Database, Connection]):
    """A failed callback does not hold back the others to its URL, but those of its round."""

    prefix, unit = "", "seq"
    next_sequence, deleted = _NEXT_SEQUENCE, _DELETED_AND_REVIVED

    @staticmethod
    def _execute(connection: Connection, sql: str, values: Mapping[str, Any]) -> Cursor:
        return connection.execute(sql, values)

    def _uncut(self, connection: Connection) -> Sequence[UncutRound]:
        return [UncutRound(Span(*row[:3]), *row[3:]) for row in connection.execute(_UNCUT)]

    def _spans(self, connection: Connection, of: UncutRound, most: int) -> Sequence[Span]:
        """The first ``most`` values, or batches of a round with roots."""
        found, nth, place = of.span, _NTH_BATCH, astuple(of.span)
        if not of.commits_roots:
            nth = _NTH_VALUE
            first = connection.execute(nth, (*place, 0)).fetchone()
            if first is None:
                return []
            found = replace(found, first_seq=first[0])
        last = connection.execute(nth, (*place, most - 1)).fetchone()
        return [found if last is None else replace(found, last_seq=last[0])]

    def _firsts(self, connection: Connection) -> Iterator[tuple[float, Delivery]]:
        for url, due in connection.execute(_TARGETS).fetchall():
            row = connection.execute(_FIRST, (url,)).fetchone()
            number, endpoint, key, sequence, attempts, round_id, *place = row
            span = None if round_id is None else Span(*place)
            yield due, Delivery(number, endpoint, url, key, sequence, attempts, span, round_id)

    def _page(self, connection: Connection, span: Span, kind: str, after: int) -> Sequence[Any]:
        place = (span.round_number, after, span.last_seq, _PAGE)
        return connection.execute(_BATCHES if kind == ROOTS else _ROWS, place).fetchall()

    @staticmethod
    def _lists(rows: Sequence[Any], kind: str) -> Mapping[str, str]:
        if kind == ROOTS:
            return {"roots": listed(root_record(CommittedBatch(*row)) for _, *row in rows)}
        if kind == ARTIFACT:
            return {"artifacts": listed_artifacts((nonce, value) for _, nonce, value in rows)}
        _, nonces, distances = zip(*rows, strict=True)
        # A stored distance is the JSON of a number already.
        return {"nonces": listed(nonces), "dist": ",".join(distances)}
