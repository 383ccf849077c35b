"""Counts of an outbox for its operator. Runs inside a transaction of the caller.

Of a callback address only the origin is shown, and of an error only its kind: the rest can hold
secrets.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from proofserve.outbox.retry import origin_of

# How many rounds are listed.
NEWEST_ROUNDS = 5
_COUNTS = """
    SELECT url,
           sum(state = 'pending'), sum(state = 'pending' AND attempts > 0), sum(state = 'done'),
           sum(state = 'expired'), sum(revived),
           min(CASE state WHEN 'pending' THEN created_at END),
           min(CASE state WHEN 'pending' THEN next_attempt_at END)
    FROM deliveries GROUP BY url ORDER BY url
"""
# Beside an aggregate that is a maximum, SQLite takes other columns from the row that has it.
_ERRORS = """
    SELECT url, last_error, max(failed_at) AS newest FROM deliveries
    WHERE state IN ('pending', 'expired') AND failed_at IS NOT NULL GROUP BY url ORDER BY newest
"""
_ROUNDS = """
    SELECT round_id, json_extract(scheme, '$.name'), block_hash, NOT closed, stored
    FROM rounds ORDER BY number DESC LIMIT ?
"""
_TOTALS = """
    SELECT (SELECT user_version FROM pragma_user_version),
           (SELECT page_count * page_size FROM pragma_page_count, pragma_page_size),
           (SELECT count(*) FROM rounds),
           (SELECT count(*) FROM rounds WHERE url IS NOT NULL AND last_seq > cut_seq),
           (SELECT coalesce(sum(stored), 0) FROM rounds),
           (SELECT results FROM pruned)
"""


@dataclass(frozen=True, slots=True)
class TargetStatistics:
    """The callbacks of one origin.

    ``pending`` are not delivered yet; ``failing`` of these have failed since they were queued or
    retried by the operator. ``delivered`` are those that are not deleted yet. ``expired`` had too
    many failures; ``revived`` counts how often the operator had expired ones sent again.
    ``oldest_pending_s`` is an age and ``next_attempt_s`` a wait, None where nothing is pending.
    ``last_error`` is the kind of the newest failure among undelivered callbacks.
    """

    origin: str
    pending: int
    failing: int
    delivered: int
    expired: int
    revived: int
    oldest_pending_s: float | None
    next_attempt_s: float | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class RoundStatistics:
    """One round: ``results`` are those kept, failures among them."""

    round_id: str
    scheme: str
    block_hash: str
    open: bool
    results: int


@dataclass(frozen=True, slots=True)
class OutboxStatistics:
    """The whole file, as far as it is not deleted by age.

    ``uncut_rounds`` have results that are in no callback yet. ``deleted_results`` were delivered
    and then deleted.
    """

    schema_version: int
    bytes: int
    rounds: int
    uncut_rounds: int
    results: int
    deleted_results: int
    targets: tuple[TargetStatistics, ...]
    newest_rounds: tuple[RoundStatistics, ...]


def read_statistics(connection: sqlite3.Connection, now: float) -> OutboxStatistics:
    """The statistics at ``now``, in wall-clock seconds."""
    version, size, rounds, uncut, results, deleted = connection.execute(_TOTALS).fetchone()
    newest = connection.execute(_ROUNDS, (NEWEST_ROUNDS,)).fetchall()
    return OutboxStatistics(
        schema_version=version,
        bytes=size,
        rounds=rounds,
        uncut_rounds=uncut,
        results=results,
        deleted_results=deleted,
        targets=tuple(_targets(connection, now)),
        newest_rounds=tuple(
            RoundStatistics(round_id, scheme, block_hash, bool(is_open), stored)
            for round_id, scheme, block_hash, is_open, stored in newest
        ),
    )


def _targets(connection: sqlite3.Connection, now: float) -> Iterator[TargetStatistics]:
    # Of several addresses with one origin the newest error comes last, and stays.
    errors = {_origin(url): _kind(error) for url, error, _ in connection.execute(_ERRORS)}
    counts: dict[str, list[list[Any]]] = {}
    for url, *columns in connection.execute(_COUNTS):
        counts.setdefault(_origin(url), []).append(columns)
    for origin, rows in counts.items():
        *numbers, created, due = zip(*rows, strict=True)
        pending, failing, delivered, expired, revived = map(sum, numbers)
        yield TargetStatistics(
            origin=origin,
            pending=pending,
            failing=failing,
            delivered=delivered,
            expired=expired,
            revived=revived,
            oldest_pending_s=max(0.0, now - _first(created)) if pending else None,
            next_attempt_s=max(0.0, _first(due) - now) if pending else None,
            last_error=errors.get(origin),
        )


def _first(times: Sequence[float | None]) -> float:
    return min(at for at in times if at is not None)


def _origin(url: str) -> str:
    return origin_of(url) or "not an address"


def _kind(error: str) -> str:
    """``HTTP 503``, ``ConnectError``, ...; what follows was said by the target, or about it."""
    return error.partition(":")[0]
