"""Callbacks as rows. Every function runs inside a transaction of the caller."""

import json
import sqlite3
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from proofserve.rounds.status import OutboxGauges
from proofserve.wire.paths import GENERATED, LOGGED, VALIDATED

ENDPOINTS = (GENERATED, VALIDATED, LOGGED)

# Characters of an error that are kept: a target's error page may be large.
_ERROR_LENGTH = 500

_ADD = """
    INSERT INTO deliveries (round, endpoint, url, first_seq, last_seq, body, idempotency_key,
                            sequence, created_at, next_attempt_at)
    VALUES (:round_number, :endpoint, :url, :first_seq, :last_seq, :body, :key,
            (SELECT coalesce(max(known), 0) + 1 FROM (
                SELECT max(sequence) AS known FROM deliveries WHERE url = :url
                UNION ALL SELECT last FROM sequences WHERE url = :url)), :now, :now)
"""
_FIRST = """
    SELECT id, endpoint, deliveries.url, idempotency_key, sequence, attempts,
           round_id, round, first_seq, deliveries.last_seq
    FROM deliveries LEFT JOIN rounds ON rounds.number = deliveries.round
    WHERE state = 'pending' AND deliveries.url = ? ORDER BY next_attempt_at, id LIMIT 1
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


@dataclass(frozen=True, slots=True)
class Span:
    """The results ``first_seq`` .. ``last_seq`` of the round with this row number."""

    round_number: int
    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """One callback to POST to ``{url}/{endpoint}``.

    ``key`` never changes; ``sequence`` rises from 1 by 1 for each ``url``; ``attempts`` counts
    the failures so far. The body is made from ``span`` of the round ``round_id``; without a span it
    is stored.
    """

    id: int
    endpoint: str
    url: str
    key: str
    sequence: int
    attempts: int
    span: Span | None
    round_id: str | None = None


def add_job(
    connection: sqlite3.Connection, endpoint: str, url: str, body: Mapping[str, Any], now: float
) -> None:
    """Queue a callback whose body is stored. Raises as ``callback_text``."""
    _add(connection, endpoint, url, now, callback_text(endpoint, body))


def callback_text(endpoint: str, body: Mapping[str, Any]) -> str:
    """The body of a callback as it is stored.

    Raises ValueError for an unknown endpoint, and for a number that JSON cannot hold.
    """
    if endpoint not in ENDPOINTS:
        raise ValueError(f"endpoint {endpoint!r} is not one of {', '.join(ENDPOINTS)}")
    return json.dumps(body, allow_nan=False, separators=(",", ":"))


def add_span(connection: sqlite3.Connection, url: str, span: Span, now: float) -> None:
    _add(connection, GENERATED, url, now, span)


def targets(connection: sqlite3.Connection) -> list[tuple[str, float]]:
    return connection.execute(
        "SELECT url, min(next_attempt_at) AS due"
        " FROM deliveries INDEXED BY deliveries_waiting"
        " WHERE state = 'pending' GROUP BY url ORDER BY due, url"
    ).fetchall()


def first_of(connection: sqlite3.Connection, url: str) -> Delivery:
    row = connection.execute(_FIRST, (url,)).fetchone()
    number, endpoint, url, key, sequence, attempts, round_id, *place = row
    span = None if round_id is None else Span(*place)
    return Delivery(number, endpoint, url, key, sequence, attempts, span, round_id)


def acknowledge(connection: sqlite3.Connection, delivery: Delivery, now: float) -> None:
    connection.execute(
        "UPDATE deliveries SET attempts = attempts + 1, state = 'done', delivered_at = ?"
        " WHERE id = ?",
        (now, delivery.id),
    )


def fail(
    connection: sqlite3.Connection,
    delivery: Delivery,
    error: str,
    pause_s: float | None,
    now: float,
) -> None:
    """Count a failure. The next attempt is due after ``pause_s`` seconds, None for never."""
    values = {
        "id": delivery.id,
        "error": error[:_ERROR_LENGTH],
        "now": now,
        "state": "expired" if pause_s is None else "pending",
        "next_attempt_at": now + (pause_s or 0.0),
    }
    connection.execute(_FAIL, values)


def gauges(connection: sqlite3.Connection, now: float) -> OutboxGauges:
    """The counters; ``last_error`` is the newest error of an undelivered callback."""
    return OutboxGauges(*connection.execute(_GAUGES, {"now": now}).fetchone())


def _add(
    connection: sqlite3.Connection, endpoint: str, url: str, now: float, about: str | Span
) -> None:
    # A URL with and without a slash at its end has one sequence.
    known = {"endpoint": endpoint, "url": url.rstrip("/"), "key": uuid.uuid4().hex, "now": now}
    if isinstance(about, Span):
        values = {**asdict(about), "body": None}
    else:
        values = {**dict.fromkeys(Span.__slots__), "body": about}
    connection.execute(_ADD, {**known, **values})
