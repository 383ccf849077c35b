"""Deletes what was delivered long ago, in small steps. Runs inside transactions of the caller.

Only delivered results are deleted: pending and expired callbacks, their results, and results that
are in no callback yet stay.
"""

import operator
from collections.abc import Sequence
from sqlite3 import Connection
from typing import Any, NamedTuple

# The most that one step deletes: it takes some milliseconds, and a new result may have to wait.
_RESULTS = 1000
_CALLBACKS = 100
# Pages that one step gives back to the file system; 1 MB.
_PAGES = 256

_DELIVERED = """
    SELECT id, url, sequence, round, first_seq, last_seq FROM deliveries
    WHERE state = 'done' AND delivered_at < ? ORDER BY delivered_at LIMIT ?
"""
# The row of the newest round stays, because a client may continue that round.
_ENDED = """
    SELECT number, after_seq, last_seq, number = (SELECT max(number) FROM rounds) FROM rounds
    WHERE closed AND closed_at < ? AND (url IS NULL OR last_seq <= cut_seq)
      AND (stored > 0 OR number < (SELECT max(number) FROM rounds))
      AND NOT EXISTS (SELECT 1 FROM deliveries WHERE round = rounds.number)
    ORDER BY number LIMIT 1
"""
# The plus keeps SQLite off the index by nonce, which would sort the whole round each time.
_DELETE_RESULTS = """
    DELETE FROM results WHERE seq IN (
        SELECT seq FROM results WHERE +round = ? AND seq BETWEEN ? AND ? ORDER BY seq LIMIT ?)
    RETURNING error IS NOT NULL
"""
_DELETE_BATCHES = """
    DELETE FROM batches WHERE round = ? AND first_index IN (
        SELECT first_index FROM batches WHERE round = ? ORDER BY first_index LIMIT ?)
"""
_KEEP_SEQUENCE = """
    INSERT INTO sequences VALUES (?, ?) ON CONFLICT DO UPDATE SET last = max(last, excluded.last)
"""


class Pruned(NamedTuple):
    """Deleted numbers: from a file since it was created, or by one call."""

    results: int
    callbacks: int
    rounds: int

    def since(self, earlier: "Pruned") -> "Pruned":
        return Pruned(*map(operator.sub, self, earlier))


def totals(connection: Connection) -> Pruned:
    return Pruned(*connection.execute("SELECT results, callbacks, rounds FROM pruned").fetchone())


def step(connection: Connection, before: float) -> bool:
    """Delete a part of what was delivered before ``before``, in wall-clock seconds.

    Results of a round without a callback URL count as delivered when the round has ended. Returns
    False if there was nothing to delete.
    """
    delivered = connection.execute(_DELIVERED, (before, _CALLBACKS)).fetchall()
    if delivered:
        _prune_callbacks(connection, delivered)
        return True
    ended = connection.execute(_ENDED, (before,)).fetchone()
    if ended is None:
        return False
    number, after_seq, last_seq, is_newest = ended
    deleted = _prune_results(connection, number, (after_seq + 1, last_seq), _RESULTS)
    if (
        deleted < _RESULTS
        and not is_newest
        and connection.execute(_DELETE_BATCHES, (number, number, _RESULTS)).rowcount == 0
    ):
        connection.execute("DELETE FROM rounds WHERE number = ?", (number,))
        connection.execute("UPDATE pruned SET rounds = rounds + 1")
    return True


def shrink(connection: Connection) -> bool:
    """Give some free pages back to the file system. False if no more are left."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    # Python runs this statement for one page only, whatever number it names.
    for _ in range(min(free, _PAGES)):
        connection.execute("PRAGMA incremental_vacuum(1)")
    (left,) = connection.execute("PRAGMA freelist_count").fetchone()
    # A file that an operator rewrote in another mode keeps its free pages.
    return 0 < int(left) < int(free)


def _prune_callbacks(connection: Connection, delivered: Sequence[Any]) -> None:
    room = _RESULTS
    for number, url, sequence, round_number, first_seq, last_seq in delivered:
        if round_number is not None:
            room -= _prune_results(connection, round_number, (first_seq, last_seq), room)
            if not room:
                # The next step deletes its other results, if it has more.
                return
        connection.execute(_KEEP_SEQUENCE, (url, sequence))
        connection.execute("DELETE FROM deliveries WHERE id = ?", (number,))
        connection.execute("UPDATE pruned SET callbacks = callbacks + 1")


def _prune_results(
    connection: Connection, round_number: int, seqs: tuple[int, int], limit: int
) -> int:
    found = connection.execute(_DELETE_RESULTS, (round_number, *seqs, limit)).fetchall()
    errors = sum(is_error for (is_error,) in found)
    connection.execute(
        "UPDATE rounds SET stored = stored - ?, pruned_values = pruned_values + ?,"
        " pruned_errors = pruned_errors + ? WHERE number = ?",
        (len(found), len(found) - errors, errors, round_number),
    )
    connection.execute("UPDATE pruned SET results = results + ?", (len(found),))
    return len(found)
