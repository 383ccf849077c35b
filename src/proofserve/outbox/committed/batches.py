"""The batches of rounds that publish roots. Every function runs inside a caller's transaction."""

import base64
import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from proofserve.protocol.commitments import CommittedBatch, leaf, root
from proofserve.protocol.nonces import NonceLane

_ROUND = """
    SELECT node_id, node_count, group_id, n_groups, batch_size, next_index
    FROM rounds WHERE number = ? AND commits_roots
"""
# One lookup in the index by nonce: all nonces of a round are of one lane, so in its order.
_RESULTS = """
    SELECT seq, nonce, value FROM results WHERE round = ? AND nonce BETWEEN ? AND ? ORDER BY nonce
"""
_LAST_ROOT = "SELECT root FROM batches WHERE round = ? ORDER BY first_index DESC LIMIT 1"
_ADD = "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)"
# The batches of a delivery's span of results.
_IN_SPAN = """
    SELECT first_index, count, root, previous_root, last_seq FROM batches
    WHERE round = ? AND last_seq > ? AND last_seq <= ? ORDER BY last_seq LIMIT ?
"""
_NTH = """
    SELECT last_seq FROM batches WHERE round = ? AND last_seq BETWEEN ? AND ?
    ORDER BY last_seq LIMIT 1 OFFSET ?
"""


class StoredNonce(NamedTuple):
    """A result of a batch. ``value`` is the vector as stored, None for a nonce that failed."""

    seq: int
    nonce: int
    value: str | None

    @property
    def leaf(self) -> bytes:
        return leaf(self.nonce, base64.b64decode(self.value or ""))


def add(connection: sqlite3.Connection, round_number: int, next_index: int) -> None:
    """Store the roots of the results between the round's progress and ``next_index``.

    They are of the rows as stored, in the transaction that stores them. No change for a round that
    publishes vectors. Raises ValueError for a batch without a result for each of its nonces.
    """
    found = connection.execute(_ROUND, (round_number,)).fetchone()
    if found is None:
        return
    *numbers, batch_size, start = found
    lane = NonceLane(*numbers)
    row = connection.execute(_LAST_ROOT, (round_number,)).fetchone()
    previous = None if row is None else row[0]
    for first in range(start, next_index, batch_size):
        nonces = lane.batch(first, min(batch_size, next_index - first))
        stored = results_of(connection, round_number, nonces)
        if tuple(each.nonce for each in stored) != nonces:
            raise ValueError(f"the batch at lane index {first} lacks results")
        top = root([each.leaf for each in stored])
        last_seq = max(each.seq for each in stored)
        connection.execute(_ADD, (round_number, first, len(nonces), top, previous, last_seq))
        previous = top


def results_of(
    connection: sqlite3.Connection, round_number: int, nonces: Sequence[int]
) -> list[StoredNonce]:
    """The results of a batch's ``nonces`` that are not deleted, in their order."""
    place = (round_number, nonces[0], nonces[-1])
    return [StoredNonce(*row) for row in connection.execute(_RESULTS, place)]


def page(
    connection: sqlite3.Connection, round_number: int, after: int, last_seq: int, limit: int
) -> tuple[int, list[CommittedBatch]] | None:
    """The next batches that end after ``after`` and up to ``last_seq``, and the last one's end."""
    rows = connection.execute(_IN_SPAN, (round_number, after, last_seq, limit)).fetchall()
    if not rows:
        return None
    return rows[-1][-1], [CommittedBatch(*row[:-1]) for row in rows]


def nth_end(
    connection: sqlite3.Connection, round_number: int, seqs: tuple[int, int], n: int
) -> int | None:
    """The end of batch ``n`` = 0, 1, ... of those that end within ``seqs``, None without it."""
    row = connection.execute(_NTH, (round_number, *seqs, n)).fetchone()
    return None if row is None else int(row[0])


def delete(connection: sqlite3.Connection, round_number: int, limit: int) -> int:
    """Delete the first ``limit`` batches of a round; returns how many there were."""
    return connection.execute(
        "DELETE FROM batches WHERE round = ? AND first_index IN ("
        "SELECT first_index FROM batches WHERE round = ? ORDER BY first_index LIMIT ?)",
        (round_number, round_number, limit),
    ).rowcount
