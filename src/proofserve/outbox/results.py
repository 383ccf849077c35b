"""Rounds and their results as rows. Every function runs inside a transaction of the caller."""

import json
import sqlite3
from collections.abc import Mapping, Sequence

from proofserve.rounds.records import Artifact, RoundSpec, StoredResult

_SPEC_COLUMNS = (
    "scheme, width, block_hash, public_key, seq_len, block_height, "
    "node_id, node_count, group_id, n_groups, batch_size, url"
)
_ADD_ROUND = f"""
    INSERT INTO rounds (round_id, {_SPEC_COLUMNS}) VALUES (?, ?,?,?,?,?,?, ?,?,?,?,?,?)
"""  # noqa: S608 - only our own column names
_FIND_SPEC = f"SELECT {_SPEC_COLUMNS} FROM rounds WHERE round_id = ?"  # noqa: S608 - as above
# The same nonce again is the same call again, after an answer that was lost: its rows are there.
_ADD_RESULT = """
    INSERT INTO results (round, nonce, value, error) VALUES (?, ?, ?, ?)
    ON CONFLICT (round, nonce) DO NOTHING
"""
_ADVANCE = """
    UPDATE rounds SET
        next_index = max(next_index, :next_index),
        stored = stored + :added,
        last_seq = CASE WHEN :added THEN (SELECT max(seq) FROM results) ELSE last_seq END,
        interval_from = coalesce(interval_from, :now)
    WHERE number = :number
"""


def open_round(connection: sqlite3.Connection, spec: RoundSpec) -> None:
    """Add a round, or reopen the same one; its results and progress stay.

    Raises ValueError when the id belongs to a different round.
    """
    columns = _spec_columns(spec)
    known = connection.execute(_FIND_SPEC, (spec.round_id,)).fetchone()
    if known is None:
        connection.execute(_ADD_ROUND, (spec.round_id, *columns))
    elif known == columns:
        connection.execute("UPDATE rounds SET closed = 0 WHERE round_id = ?", (spec.round_id,))
    else:
        raise ValueError(f"round {spec.round_id!r} is known with another order")


def close_round(connection: sqlite3.Connection, round_id: str) -> None:
    """Mark a round as ended. Raises ValueError for an unknown one."""
    number, *_ = _find(connection, round_id)
    connection.execute("UPDATE rounds SET closed = 1 WHERE number = ?", (number,))


def progress(connection: sqlite3.Connection, round_id: str) -> int:
    """The index at which a round's lane goes on. Raises ValueError for an unknown round."""
    row = connection.execute("SELECT next_index FROM rounds WHERE round_id = ?", (round_id,))
    found = row.fetchone()
    if found is None:
        raise _unknown(round_id)
    return int(found[0])


def add(
    connection: sqlite3.Connection,
    round_id: str,
    next_index: int,
    rows: Sequence[tuple[int, str | None, str | None]],
    now: float,
) -> bool:
    """Store ``rows`` of (nonce, value, error) and the progress.

    Returns whether the sender must hear of it: a round with a URL had nothing waiting before, or
    has ended. Raises ValueError for an unknown round.
    """
    number, news = _find(connection, round_id)
    cursor = connection.executemany(_ADD_RESULT, [(number, *row) for row in rows])
    # rowcount is -1 when there was nothing to run.
    added = max(cursor.rowcount, 0)
    values = {"next_index": next_index, "added": added, "now": now, "number": number}
    connection.execute(_ADVANCE, values)
    return bool(added and news)


def rows_of(
    artifacts: Sequence[Artifact], failed: Mapping[int, str]
) -> list[tuple[int, str | None, str | None]]:
    """The rows (nonce, value, error) for one call's results and failures."""
    rows: list[tuple[int, str | None, str | None]] = [
        (artifact.nonce, artifact.vector_b64, None) for artifact in artifacts
    ]
    rows += [(nonce, None, reason) for nonce, reason in failed.items()]
    return rows


def after(connection: sqlite3.Connection, seq: int, limit: int) -> list[StoredResult]:
    """Rows above ``seq`` in order, at most ``limit``."""
    found = connection.execute(
        "SELECT seq, round_id, nonce, value, error"
        " FROM results JOIN rounds ON rounds.number = results.round"
        " WHERE seq > ? ORDER BY seq LIMIT ?",
        (seq, limit),
    )
    return [StoredResult(*row) for row in found]


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


def _spec_columns(spec: RoundSpec) -> tuple[str | int | None, ...]:
    work, lane = spec.work, spec.lane
    return (
        json.dumps(work.scheme.to_wire(), sort_keys=True),
        work.scheme.width,
        work.block_hash,
        work.public_key,
        work.seq_len,
        spec.block_height,
        lane.node_id,
        lane.node_count,
        lane.group_id,
        lane.n_groups,
        spec.batch_size,
        spec.url,
    )
