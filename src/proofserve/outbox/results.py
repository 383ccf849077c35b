"""Rounds and their results as rows. Every function runs inside a transaction of the caller."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from proofserve.outbox.committed import batches
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import from_wire
from proofserve.rounds.records import (
    Artifact,
    Finding,
    RoundProgress,
    RoundSpec,
    StoredResult,
    Target,
    Winner,
    Workload,
)

_SPEC_COLUMNS = (
    "scheme, width, block_hash, public_key, seq_len, block_height, "
    "node_id, node_count, group_id, n_groups, batch_size, url, r_target, fraud_threshold, "
    "commits_roots"
)
_ADD_ROUND = f"""
    INSERT INTO rounds (round_id, {_SPEC_COLUMNS}, after_seq)
    VALUES (?, ?,?,?,?,?,?, ?,?,?,?,?,?, ?,?, ?, (SELECT coalesce(max(seq), 0) FROM results))
"""  # noqa: S608 - only our own column names
_FIND_SPEC = f"SELECT {_SPEC_COLUMNS} FROM rounds WHERE round_id = ?"  # noqa: S608 - as above
_FIND_OPEN = f"SELECT round_id, {_SPEC_COLUMNS} FROM rounds WHERE NOT closed"  # noqa: S608 - too
# A nonce that is stored already comes from a call that is repeated after its answer was lost.
_ADD_RESULT = """
    INSERT INTO results (round, nonce, value, error) VALUES (?, ?, ?, ?)
    ON CONFLICT (round, nonce) DO NOTHING
"""
# Reads only rows between the round's newest and its first, the newest first. The plus keeps SQLite
# from using the index by nonce, with which it would sort the whole round.
_NEWEST_WINNERS = """
    SELECT nonce, value FROM results JOIN rounds ON +results.round = rounds.number
    WHERE round_id = ? AND r_target IS NOT NULL
      AND seq > after_seq AND seq <= rounds.last_seq AND value IS NOT NULL
    ORDER BY seq DESC LIMIT ?
"""
_AFTER = """
    SELECT seq, round_id, nonce, value, error, r_target IS NOT NULL
    FROM results JOIN rounds ON rounds.number = results.round
    WHERE seq > :seq ORDER BY seq LIMIT :limit
"""
# From the round's first row to its last, with a plus for the same reason.
_AFTER_IN_ROUND = """
    SELECT seq, round_id, nonce, value, error, r_target IS NOT NULL
    FROM results JOIN rounds ON +results.round = rounds.number
    WHERE rounds.number = :number AND seq > max(:seq, after_seq) AND seq <= rounds.last_seq
    ORDER BY seq LIMIT :limit
"""
_ADVANCE = """
    UPDATE rounds SET
        next_index = max(next_index, :next_index),
        stored = stored + :added,
        last_seq = CASE WHEN :added THEN (SELECT max(seq) FROM results) ELSE last_seq END,
        interval_from = coalesce(interval_from, :now)
    WHERE number = :number
"""
# (nonce, value, error).
_Row = tuple[int, str | None, str | None]


def open_round(connection: sqlite3.Connection, spec: RoundSpec, now: float) -> RoundProgress:
    """Add a round, or reopen it with its results and progress. Closes any other round.

    Raises ValueError if the id belongs to a round with other parameters.
    """
    columns = _spec_columns(spec)
    known = connection.execute(_FIND_SPEC, (spec.round_id,)).fetchone()
    if known not in (None, columns):
        raise ValueError(f"round {spec.round_id!r} exists with other parameters")
    connection.execute("UPDATE rounds SET closed = 1, closed_at = ? WHERE NOT closed", (now,))
    if known is None:
        connection.execute(_ADD_ROUND, (spec.round_id, *columns))
    else:
        connection.execute(
            "UPDATE rounds SET closed = 0, closed_at = NULL WHERE round_id = ?", (spec.round_id,)
        )
    return progress(connection, spec.round_id)


def open_spec(connection: sqlite3.Connection) -> RoundSpec | None:
    row = connection.execute(_FIND_OPEN).fetchone()
    return None if row is None else _spec(*row)


def close_round(connection: sqlite3.Connection, round_id: str, now: float) -> None:
    number, *_ = _find(connection, round_id)
    connection.execute(
        "UPDATE rounds SET closed = 1, closed_at = ? WHERE number = ? AND NOT closed", (now, number)
    )


def progress(connection: sqlite3.Connection, round_id: str) -> RoundProgress:
    row = connection.execute(
        "SELECT next_index, count(value) + pruned_values, count(error) + pruned_errors"
        " FROM rounds LEFT JOIN results ON results.round = rounds.number"
        " WHERE round_id = ? GROUP BY rounds.number",
        (round_id,),
    ).fetchone()
    if row is None:
        raise _unknown(round_id)
    return RoundProgress(*row)


def add(
    connection: sqlite3.Connection, round_id: str, next_index: int, rows: Sequence[_Row], now: float
) -> bool:
    """Store ``rows``, the roots of their batches if the round publishes these, and the progress.

    Returns whether to wake the sender: the round has a URL, and had no result waiting for a
    callback before, or has ended. Raises ValueError for an unknown round, and as ``batches.add``.
    """
    number, wakes_sender = _find(connection, round_id)
    cursor = connection.executemany(_ADD_RESULT, [(number, *row) for row in rows])
    # rowcount is -1 for an empty list.
    added = max(cursor.rowcount, 0)
    # Before the progress, which tells where the new batches begin.
    batches.add(connection, number, next_index)
    connection.execute(
        _ADVANCE, {"next_index": next_index, "added": added, "now": now, "number": number}
    )
    return bool(added and wakes_sender)


def rows_of(findings: Sequence[Finding], failed: Mapping[int, str]) -> list[_Row]:
    """The rows to store. The value of a winner is its distance as JSON, with all digits.

    Raises ValueError for a distance that JSON cannot hold.
    """
    return [
        *((one.nonce, _value(one), None) for one in findings),
        *((nonce, None, reason) for nonce, reason in failed.items()),
    ]


def after(
    connection: sqlite3.Connection, seq: int, limit: int, number: int | None = None
) -> list[StoredResult]:
    which = _AFTER if number is None else _AFTER_IN_ROUND
    found = connection.execute(which, {"seq": seq, "limit": limit, "number": number})
    return [_stored(*row) for row in found]


def newest_winners(connection: sqlite3.Connection, round_id: str, limit: int) -> list[Winner]:
    """The last ``limit`` winners of a distance round, oldest first; empty for any other round."""
    found = connection.execute(_NEWEST_WINNERS, (round_id, limit)).fetchall()
    return [Winner(nonce, float(value)) for nonce, value in reversed(found)]


def _value(finding: Finding) -> str:
    if isinstance(finding, Artifact):
        return finding.vector_b64
    return json.dumps(finding.distance, allow_nan=False)


def _stored(
    seq: int, round_id: str, nonce: int, value: str | None, error: str | None, distance: int
) -> StoredResult:
    if distance and value is not None:
        return StoredResult(seq, round_id, nonce, distance=float(value))
    return StoredResult(seq, round_id, nonce, value, error)


def _find(connection: sqlite3.Connection, round_id: str) -> tuple[int, bool]:
    row = connection.execute(
        "SELECT number, url IS NOT NULL AND (closed OR last_seq <= cut_seq)"
        " FROM rounds WHERE round_id = ?",
        (round_id,),
    ).fetchone()
    if row is None:
        raise _unknown(round_id)
    return int(row[0]), bool(row[1])


def _unknown(round_id: str) -> ValueError:
    return ValueError(f"round {round_id!r} was never opened")


def _spec_columns(spec: RoundSpec) -> tuple[str | int | float | None, ...]:
    work, lane, target = spec.work, spec.lane, spec.target
    if lane is None:
        raise ValueError(f"round {spec.round_id!r} has no nonces to generate")
    scheme = json.dumps(work.scheme.to_wire(), sort_keys=True)
    return (
        *(scheme, work.scheme.width, work.block.hash, work.public_key, work.seq_len),
        *(work.block.height, *astuple(lane), spec.batch_size, spec.url),
        *((None, None) if target is None else astuple(target)),
        int(spec.commits_roots),
    )


def _spec(round_id: str, *columns: Any) -> RoundSpec:
    scheme, _width, block_hash, public_key, seq_len, height, *rest = columns
    *lane, batch_size, url, r_target, fraud_threshold, commits_roots = rest
    return RoundSpec(
        round_id=round_id,
        work=Workload(
            from_wire(json.loads(scheme)), Block(block_hash, height), public_key, seq_len
        ),
        lane=NonceLane(*lane),
        batch_size=batch_size,
        url=url,
        target=None if r_target is None else Target(r_target, fraud_threshold),
        commits_roots=bool(commits_roots),
    )
