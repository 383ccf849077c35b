"""Callbacks: when they are due, rows and bodies (A.8, B.7)."""

import sqlite3
import uuid
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from sqlite3 import Connection
from typing import Any

from proofserve.outbox.database import Database, StorePart, announces, reads, writes
from proofserve.outbox.planning import (
    CallbackPolicy,
    Delivery,
    SendPlan,
    Span,
    callback_text,
    joined,
    listed,
    send_plan,
    wait_until,
)
from proofserve.protocol.commitments import CommittedBatch
from proofserve.rounds.records import CompletedJob, DistanceVerdict
from proofserve.rounds.status import OutboxGauges
from proofserve.wire import GENERATED
from proofserve.wire.callbacks import callback
from proofserve.wire.records import (
    ARTIFACT,
    DISTANCE,
    ROOTS,
    artifact_record,
    encoding_of,
    root_record,
)


class CallbackQueue(StorePart[Database]):
    """What ``CallbackSender`` needs, and the callbacks that others queue."""

    _failed_attempts = 0

    async def push(self, url: str, about: CompletedJob | DistanceVerdict) -> None:
        endpoint, body = callback(about)
        await self.enqueue(endpoint, url, body)

    @announces
    def enqueue(
        self, connection: Connection, endpoint: str, url: str, body: Mapping[str, Any]
    ) -> None:
        """Queue one callback, due at once. Raises ValueError for a body that is not JSON."""
        add_job(connection, endpoint, url, body, self.clock())

    @writes
    def plan(
        self,
        connection: Connection,
        policy: CallbackPolicy,
        busy: frozenset[str] = frozenset(),
        flushing: bool = False,
    ) -> SendPlan:
        """Make the due callbacks, all if ``flushing``; choose those to post, none to ``busy``."""
        now = self.clock()
        uncut = _cut_rounds(connection, policy, flushing, now)
        targets = connection.execute(_TARGETS).fetchall()
        first_of = partial(_first_of, connection)
        return send_plan(targets, first_of, uncut, policy, busy, now)

    async def body(self, delivery: Delivery) -> bytes:
        span = delivery.span
        if span is None:
            stored, of = "SELECT body FROM deliveries WHERE id = ?", (delivery.id,)
            (text,) = await self.database.read(lambda c: c.execute(stored, of).fetchone())
            return bytes(text, "utf-8")
        head, tail, kind = await self.database.read(_parts, span)
        pages: list[dict[str, str]] = []
        after = span.first_seq - 1
        while page := await self.database.read(_page, span, kind, after):
            after, lists = page
            pages.append(lists)
        return joined(head, pages, tail)

    @writes
    def acknowledge(self, connection: Connection, delivery: Delivery) -> None:
        connection.execute(_ACKNOWLEDGE, (self.clock(), delivery.id))

    async def fail(self, delivery: Delivery, error: str, pause_s: float | None) -> None:
        """Count a failure. The next attempt is due after ``pause_s`` seconds, None for never."""
        now, state = self.clock(), "expired" if pause_s is None else "pending"
        # A target's error page may be large.
        values = {"id": delivery.id, "error": error[:500], "now": now, "state": state}
        values["next_attempt_at"] = now + (pause_s or 0.0)
        await self.database.write(lambda c: c.execute(_FAIL, values))
        self._failed_attempts += 1

    @reads
    def gauges(self, connection: Connection) -> OutboxGauges:
        """The counters; ``last_error`` is the newest error of an undelivered callback."""
        read = OutboxGauges(*connection.execute(_GAUGES, {"now": self.clock()}).fetchone())
        return replace(read, failed_attempts=self._failed_attempts)


# -- what is due -----------------------------------------------------------------------------------

_UNCUT = """
    SELECT number, url, closed OR r_target IS NOT NULL, cut_seq, last_seq, interval_from,
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


def _cut_rounds(
    connection: Connection, policy: CallbackPolicy, flushing: bool, now: float
) -> list[float]:
    """Make callbacks of due results. Returns the waits of the rounds that are not due yet.

    Winners are due at once (A.8): a callback holds those of one batch, or of all batches that were
    stored while the previous callback was pending.
    """
    waits = []
    # All rows first: the loop changes the table.
    rounds = connection.execute(_UNCUT).fetchall()
    for number, url, at_once, cut_seq, last_seq, since, commits_roots in rounds:
        wait_s = wait_until(since + policy.interval_s, now, policy.interval_s)
        if wait_s > 0.0 and not at_once and not flushing:
            waits.append(wait_s)
            continue
        uncut = Span(number, cut_seq + 1, last_seq)
        span = _next_span(connection, uncut, commits_roots, policy.max_artifacts)
        if span is not None:
            _add(connection, GENERATED, url, now, span)
        connection.execute(
            "UPDATE rounds SET cut_seq = ?, interval_from = ? WHERE number = ?",
            (last_seq if span is None else span.last_seq, now, number),
        )
    return waits


def _next_span(connection: Connection, uncut: Span, commits_roots: bool, most: int) -> Span | None:
    """The first ``most`` values of ``uncut``, or batches of a round with roots; None: no values."""
    place = (uncut.round_number, uncut.first_seq, uncut.last_seq)
    first_seq, nth = uncut.first_seq, _NTH_BATCH
    if not commits_roots:
        nth = _NTH_VALUE
        first = connection.execute(nth, (*place, 0)).fetchone()
        if first is None:
            return None
        first_seq = first[0]
    last = connection.execute(nth, (*place, most - 1)).fetchone()
    return Span(uncut.round_number, first_seq, uncut.last_seq if last is None else last[0])


# -- rows ------------------------------------------------------------------------------------------

_ADD = """
    INSERT INTO deliveries (round, endpoint, url, first_seq, last_seq, body, idempotency_key,
                            sequence, created_at, next_attempt_at)
    VALUES (:round_number, :endpoint, :url, :first_seq, :last_seq, :body, :key,
            (SELECT coalesce(max(known), 0) + 1 FROM (
                SELECT max(sequence) AS known FROM deliveries WHERE url = :url
                UNION ALL SELECT last FROM sequences WHERE url = :url)), :now, :now)
"""
_TARGETS = """
    SELECT url, min(next_attempt_at) AS due FROM deliveries INDEXED BY deliveries_waiting
    WHERE state = 'pending' GROUP BY url ORDER BY due, url
"""
_FIRST = """
    SELECT id, endpoint, deliveries.url, idempotency_key, sequence, attempts,
           round_id, round, first_seq, deliveries.last_seq
    FROM deliveries LEFT JOIN rounds ON rounds.number = deliveries.round
    WHERE state = 'pending' AND deliveries.url = ? ORDER BY next_attempt_at, id LIMIT 1
"""
_ACKNOWLEDGE = """
    UPDATE deliveries SET attempts = attempts + 1, state = 'done', delivered_at = ? WHERE id = ?
"""
_FAIL = """
    UPDATE deliveries SET attempts = attempts + 1, last_error = :error, failed_at = :now,
                          state = :state, next_attempt_at = :next_attempt_at
    WHERE id = :id
"""
_GAUGES = """
    SELECT (SELECT coalesce(sum(stored), 0) FROM rounds),
           (SELECT count(*) FROM deliveries WHERE state = 'pending'),
           (SELECT count(*) FROM deliveries WHERE state = 'done') + (SELECT callbacks FROM pruned),
           (SELECT count(*) FROM deliveries WHERE state = 'expired'),
           (SELECT max(0.0, coalesce(:now - min(created_at), 0.0)) FROM deliveries
            WHERE state = 'pending'),
           (SELECT last_error FROM deliveries
            WHERE state IN ('pending', 'expired') AND failed_at IS NOT NULL
            ORDER BY failed_at DESC, id DESC LIMIT 1),
           (SELECT coalesce(sum(revived), 0) FROM deliveries WHERE revived > 0)
"""


def _first_of(connection: Connection, url: str) -> Delivery:
    row = connection.execute(_FIRST, (url,)).fetchone()
    number, endpoint, url, key, sequence, attempts, round_id, *place = row
    span = None if round_id is None else Span(*place)
    return Delivery(number, endpoint, url, key, sequence, attempts, span, round_id)


def add_job(
    connection: Connection, endpoint: str, url: str, body: Mapping[str, Any], now: float
) -> None:
    """Queue a callback whose body is stored. Raises as ``callback_text``."""
    _add(connection, endpoint, url, now, callback_text(endpoint, body))


def _add(connection: Connection, endpoint: str, url: str, now: float, about: str | Span) -> None:
    values = {**dict.fromkeys(Span.__slots__), "body": about}
    if isinstance(about, Span):
        values = {**asdict(about), "body": None}
    # A URL with and without a slash at its end has one sequence.
    values |= {"endpoint": endpoint, "url": url.rstrip("/"), "key": uuid.uuid4().hex, "now": now}
    connection.execute(_ADD, values)


# -- bodies ----------------------------------------------------------------------------------------

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
    WHERE +round = ? AND seq > ? AND seq <= ? AND value IS NOT NULL ORDER BY seq LIMIT ?
"""
_BATCHES = """
    SELECT last_seq, first_index, count, root, previous_root FROM batches
    WHERE round = ? AND last_seq > ? AND last_seq <= ? ORDER BY last_seq LIMIT ?
"""


def _parts(connection: Connection, span: Span) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The members of the body before and after its lists (B.7 or A.8), and the lists' kind."""
    cursor = connection.cursor()
    cursor.row_factory = sqlite3.Row
    row = cursor.execute(_HEAD, (span.round_number,)).fetchone()

    def members(*names: str) -> dict[str, Any]:
        return {name: row[name] for name in names}

    head = members("public_key", "block_hash", "block_height", "node_id")
    if row["r_target"] is not None:
        return head, members("r_target"), DISTANCE
    encoding = {"encoding": encoding_of(row["width"])}
    if not row["commits_roots"]:
        return head, encoding, ARTIFACT
    head |= members("node_count", "group_id", "n_groups", "round_id")
    return head, members("scheme") | encoding | {"params": members("seq_len")}, ROOTS


def _page(
    connection: Connection, span: Span, kind: str, after: int
) -> tuple[int, dict[str, str]] | None:
    """The next rows of ``span`` behind ``after``: last seq, and lists as JSON without brackets."""
    place = (span.round_number, after, span.last_seq, _PAGE)
    rows = connection.execute(_BATCHES if kind == ROOTS else _ROWS, place).fetchall()
    if not rows:
        return None
    last_seq = rows[-1][0]
    if kind == ROOTS:
        roots = [root_record(CommittedBatch(*row)) for _, *row in rows]
        return last_seq, {"roots": listed(roots)}
    if kind == ARTIFACT:
        artifacts = [artifact_record(*row) for _, *row in rows]
        return last_seq, {"artifacts": listed(artifacts)}
    _, nonces, distances = zip(*rows, strict=True)
    # A stored distance is the JSON of a number already.
    return last_seq, {"nonces": listed(nonces), "dist": ",".join(distances)}
