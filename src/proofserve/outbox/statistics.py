"""Counts of an outbox for its operator. Runs inside a transaction of the caller.

Shows only the origin of a callback URL and only the kind of an error: the rest can hold secrets.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from proofserve.outbox.retry import origin_of

# How many rounds are listed.
NEWEST_ROUNDS = 5
# ``origin`` is our own function; times are null where nothing is pending.
_COUNTS = """
    SELECT origin(url) AS origin, sum(state = 'pending') AS pending,
           sum(state = 'pending' AND attempts > 0) AS failing, sum(state = 'done') AS delivered,
           sum(state = 'expired') AS expired, sum(revived) AS revived,
           max(0.0, :now - min(CASE state WHEN 'pending' THEN created_at END)) AS oldest_pending_s,
           max(0.0, min(CASE state WHEN 'pending' THEN next_attempt_at END) - :now)
               AS next_attempt_s
    FROM deliveries GROUP BY origin ORDER BY min(url)
"""
# Beside an aggregate that is a maximum, SQLite takes other columns from the row that has it.
_ERRORS = """
    SELECT origin(url) AS origin, last_error, max(failed_at) FROM deliveries
    WHERE state IN ('pending', 'expired') AND failed_at IS NOT NULL GROUP BY origin
"""
_ROUNDS = """
    SELECT round_id, json_extract(scheme, '$.name') AS scheme, block_hash, NOT closed AS open,
           stored AS results
    FROM rounds ORDER BY number DESC LIMIT :limit
"""
_TOTALS = """
    SELECT (SELECT user_version FROM pragma_user_version) AS schema_version,
           (SELECT page_count * page_size FROM pragma_page_count, pragma_page_size) AS bytes,
           (SELECT count(*) FROM rounds) AS rounds,
           (SELECT count(*) FROM rounds WHERE url IS NOT NULL AND last_seq > cut_seq)
               AS uncut_rounds,
           (SELECT coalesce(sum(stored), 0) FROM rounds) AS results,
           (SELECT results FROM pruned) AS deleted_results,
           (SELECT stored - deleted FROM receipt_totals) AS receipts,
           (SELECT count(*) FROM log_entries) AS log_entries
"""


@dataclass(frozen=True, slots=True)
class TargetStatistics:
    """The callbacks of one origin.

    ``pending`` are not delivered yet; ``failing`` of these have failed since they were queued or
    retried by the operator. ``delivered`` are those that are not deleted yet. ``expired`` had too
    many failures; ``revived`` counts expired ones that the operator made due again.
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
    """The whole file, without what is already deleted.

    ``uncut_rounds`` have results that are in no callback yet; ``deleted_results`` were delivered.
    ``receipts`` are those kept, ``log_entries`` those of their log.
    """

    schema_version: int
    bytes: int
    rounds: int
    uncut_rounds: int
    results: int
    deleted_results: int
    receipts: int
    log_entries: int
    targets: tuple[TargetStatistics, ...]
    newest_rounds: tuple[RoundStatistics, ...]


def read_statistics(connection: sqlite3.Connection, now: float) -> OutboxStatistics:
    connection.create_function("origin", 1, cache(lambda url: origin_of(url) or "not an address"))
    # ``HTTP 503``, ``ConnectError``, ...; the text after it may come from the target.
    errors = {to: error.partition(":")[0] for to, error, _ in connection.execute(_ERRORS)}
    counts = _rows(connection, _COUNTS, {"now": now})
    rounds = _rows(connection, _ROUNDS, {"limit": NEWEST_ROUNDS})
    (totals,) = _rows(connection, _TOTALS, {})
    return OutboxStatistics(
        **totals,
        targets=tuple(
            TargetStatistics(**row, last_error=errors.get(row["origin"])) for row in counts
        ),
        newest_rounds=tuple(
            RoundStatistics(**{**row, "open": bool(row["open"])}) for row in rounds
        ),
    )


def _rows(connection: sqlite3.Connection, sql: str, values: Mapping[str, Any]) -> Iterator[Any]:
    """Rows by the names of their columns, which are fields of the records above."""
    cursor = connection.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor.execute(sql, values)
