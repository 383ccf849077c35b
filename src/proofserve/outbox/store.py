"""The outbox: rounds, their results and the roots of their batches in one SQLite file."""

import asyncio
import base64
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Self

from proofserve.outbox import pruning
from proofserve.outbox.callbacks import SqliteCallbacks
from proofserve.outbox.database import SCHEMA_VERSION, Database, announces, named_rows, reads
from proofserve.outbox.pruning import Pruned
from proofserve.outbox.receipts import SqliteReceipts
from proofserve.protocol.commitments import CommittedBatch, Opening, leaf, paths, root
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.errors import Refusal, Refused
from proofserve.rounds.ports import Outbox
from proofserve.rounds.records import (
    CommittedRound,
    Finding,
    RoundProgress,
    RoundSpec,
    StoredResult,
    Target,
    Winner,
    Workload,
)


class SqliteOutbox(SqliteCallbacks, Outbox):
    """Keeps everything on disk; made by ``open``, and closes when its context is left.

    Methods raise ValueError for an unknown round, and OutboxUnavailable if the disk fails: nothing
    is stored then, and the outbox stays usable. ``news`` is set when the sender may have work.
    ``receipts`` are in the same file. Only ``prune`` deletes anything.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        super().__init__(database, clock, asyncio.Event())
        self.receipts = SqliteReceipts(database, clock, self.news)

    @classmethod
    async def open(cls, path: Path, clock: Callable[[], float] = time.time) -> Self:
        """``clock`` gives wall-clock seconds. Raises as ``Database.open``."""
        return cls(await Database.open(path), clock)

    async def close(self) -> None:
        await self.database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def probe(self) -> None:
        await self.database.write(lambda c: c.execute(f"PRAGMA user_version = {SCHEMA_VERSION}"))

    async def prune(self, older_than_s: float) -> Pruned:
        """Delete what was delivered more than ``older_than_s`` seconds ago. Returns the numbers.

        It deletes in steps of some milliseconds, with pauses for other transactions.
        """
        before = self.clock() - older_than_s
        at_first = await self.database.read(pruning.totals)
        await self.database.delete(partial(pruning.step, before=before), pruning.shrink)
        return (await self.database.read(pruning.totals)).since(at_first)

    @announces
    def open_round(self, connection: Connection, spec: RoundSpec) -> RoundProgress:
        """As the port. Raises ValueError for a round without a lane or with other parameters.

        Wakes the sender: an earlier round that this closes may have undelivered results.
        """
        columns = _columns(spec)
        known = named_rows(connection, _FIND_SPEC, {"round_id": spec.round_id})
        if known not in ([], [columns]):
            raise ValueError(f"round {spec.round_id!r} exists with other parameters")
        close = "UPDATE rounds SET closed = 1, closed_at = ? WHERE NOT closed"
        connection.execute(close, (self.clock(),))
        if not known:
            connection.execute(_ADD_ROUND, columns)
        else:
            reopen = "UPDATE rounds SET closed = 0, closed_at = NULL WHERE round_id = ?"
            connection.execute(reopen, (spec.round_id,))
        return progress(connection, spec.round_id)

    @reads
    def interrupted(self, connection: Connection) -> RoundSpec | None:
        found = named_rows(connection, f"{_SPECS} WHERE NOT closed", {})
        return _spec(found[0]) if found else None

    async def record(
        self, round_id: str, next_index: int, findings: Sequence[Finding], failed: Mapping[int, str]
    ) -> None:
        """As the port. Raises ValueError also for a distance that is not finite."""
        rows = rows_of(findings, failed)
        news = True
        try:
            news = await self.database.write(add, round_id, next_index, rows, self.clock())
        finally:
            # Also after a cancellation: the rows may be stored nevertheless.
            if news:
                self.news.set()

    @announces
    def close_round(self, connection: Connection, round_id: str) -> None:
        number, _ = _find(connection, round_id)
        close = "UPDATE rounds SET closed = 1, closed_at = ? WHERE number = ? AND NOT closed"
        connection.execute(close, (self.clock(), number))

    @reads
    def results(self, connection: Connection, after: int, limit: int) -> list[StoredResult]:
        # SQLite treats a negative limit as no limit.
        return results_after(connection, after, max(0, limit))

    @reads
    def winners(self, connection: Connection, round_id: str, limit: int) -> list[Winner]:
        found = connection.execute(_NEWEST_WINNERS, (round_id, max(0, limit))).fetchall()
        return [Winner(nonce, float(value)) for nonce, value in reversed(found)]

    @reads
    def committed_round(
        self, connection: Connection, block_hash: str, public_key: str, round_id: str | None
    ) -> CommittedRound:
        about = {"block_hash": block_hash, "public_key": public_key, "round_id": round_id}
        rows = named_rows(connection, _OF_BLOCK, about)
        which = f"block {block_hash}, key {public_key}" + (f", id {round_id}" if round_id else "")
        if not rows:
            text = f"there is no round of {which}: there never was one, or it is deleted"
            raise Refused(Refusal.UNKNOWN_ROUND, text)
        committed = [
            CommittedRound(row["round_id"], _lane(row), row["next_index"])
            for row in rows
            if row["commits_roots"]
        ]
        if not committed:
            text = f"the round of {which} publishes vectors, not roots"
            raise Refused(Refusal.NOT_COMMITTED, text)
        if len(committed) > 1:
            named = ", ".join(each.round_id for each in committed[-_NAMED:])
            text = f"several rounds of {which} publish roots; give round_id: {named}"
            raise Refused(Refusal.SEVERAL_ROUNDS, text)
        return committed[0]

    async def openings(self, committed: CommittedRound, nonces: Sequence[int]) -> list[Opening]:
        """As the port. One short transaction for each batch, so that new results need not wait."""
        left = sorted({_index(committed, nonce) for nonce in nonces})
        opened: dict[int, Opening] = {}
        while left:
            found = await self.database.read(_open_batch, committed, left)
            opened |= {each.nonce: each for each in found}
            left = left[len(found) :]
        return [opened[nonce] for nonce in nonces]

    def _spec(self, connection: Connection, round_number: int) -> RoundSpec:
        (row,) = named_rows(
            connection, f"{_SPECS} WHERE number = :number", {"number": round_number}
        )
        return _spec(row)


# -- rounds ----------------------------------------------------------------------------------------

_LANE = tuple(each.name for each in fields(NonceLane))
_COLUMNS = (
    *("round_id", "scheme", "width", "block_hash", "block_height", "public_key", "seq_len"),
    *(*_LANE, "batch_size", "url", "r_target", "fraud_threshold", "commits_roots"),
)
_SPECS = f"SELECT {', '.join(_COLUMNS)} FROM rounds"  # noqa: S608 - only our own column names
_FIND_SPEC = f"{_SPECS} WHERE round_id = :round_id"
_ADD_ROUND = f"""
    INSERT INTO rounds ({", ".join(_COLUMNS)}, after_seq)
    VALUES (:{", :".join(_COLUMNS)}, (SELECT coalesce(max(seq), 0) FROM results))
"""  # noqa: S608 - as above
_PROGRESS = """
    SELECT next_index, count(value) + pruned_values, count(error) + pruned_errors
    FROM rounds LEFT JOIN results ON results.round = rounds.number
    WHERE round_id = ? GROUP BY rounds.number
"""


def progress(connection: Connection, round_id: str) -> RoundProgress:
    return RoundProgress(*connection.execute(_PROGRESS, (round_id,)).fetchone())


def _find(connection: Connection, round_id: str) -> tuple[int, bool]:
    row = connection.execute(
        "SELECT number, url IS NOT NULL AND (closed OR last_seq <= cut_seq)"
        " FROM rounds WHERE round_id = ?",
        (round_id,),
    ).fetchone()
    if row is None:
        raise ValueError(f"round {round_id!r} was never opened")
    return int(row[0]), bool(row[1])


def _columns(spec: RoundSpec) -> dict[str, str | int | float | None]:
    """The order as the row of the round has it."""
    work, lane, target = spec.work, spec.lane, spec.target
    if lane is None:
        raise ValueError(f"round {spec.round_id!r} has no nonces to generate")
    return {
        "round_id": spec.round_id,
        "scheme": json.dumps(work.scheme.to_wire(), sort_keys=True),
        "width": work.scheme.width,
        "block_hash": work.block.hash,
        "block_height": work.block.height,
        "public_key": work.public_key,
        "seq_len": work.seq_len,
        **asdict(lane),
        "batch_size": spec.batch_size,
        "url": spec.url,
        "r_target": target.r_target if target else None,
        "fraud_threshold": target.fraud_threshold if target else None,
        "commits_roots": int(spec.commits_roots),
    }


def _spec(row: Mapping[str, Any]) -> RoundSpec:
    # This imports torch, which takes seconds; commands that read the file do not need it.
    from proofserve.protocol.schemes import from_wire  # noqa: PLC0415

    scheme = from_wire(json.loads(row["scheme"]))
    block, r_target = Block(row["block_hash"], row["block_height"]), row["r_target"]
    return RoundSpec(
        round_id=row["round_id"],
        work=Workload(scheme, block, row["public_key"], row["seq_len"]),
        lane=_lane(row),
        batch_size=row["batch_size"],
        url=row["url"],
        target=None if r_target is None else Target(r_target, row["fraud_threshold"]),
        commits_roots=bool(row["commits_roots"]),
    )


def _lane(row: Mapping[str, Any]) -> NonceLane:
    return NonceLane(**{name: row[name] for name in _LANE})


# -- results ---------------------------------------------------------------------------------------

# (nonce, value, error).
_Row = tuple[int, str | None, str | None]
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


def add(
    connection: Connection, round_id: str, next_index: int, rows: Sequence[_Row], now: float
) -> bool:
    """Store ``rows``, the roots of their batches if the round publishes these, and the progress.

    Returns whether to wake the sender: the round has a URL, and had no result waiting for a
    callback before, or has ended. Raises ValueError for an unknown round, and as ``_add_batches``.
    """
    number, wakes_sender = _find(connection, round_id)
    cursor = connection.executemany(_ADD_RESULT, [(number, *row) for row in rows])
    # rowcount is -1 for an empty list.
    added = max(cursor.rowcount, 0)
    # Before the progress, which tells where the new batches begin.
    _add_batches(connection, number, next_index)
    connection.execute(
        _ADVANCE, {"next_index": next_index, "added": added, "now": now, "number": number}
    )
    return bool(added and wakes_sender)


def rows_of(findings: Sequence[Finding], failed: Mapping[int, str]) -> list[_Row]:
    """The value of a winner is its distance as JSON. Raises ValueError for NaN or an infinity."""
    rows: list[_Row] = []
    for one in findings:
        if isinstance(one, Claim):
            rows.append((one.nonce, one.vector_b64, None))
        else:
            rows.append((one.nonce, json.dumps(one.distance, allow_nan=False), None))
    return rows + [(nonce, None, reason) for nonce, reason in failed.items()]


def results_after(
    connection: Connection, seq: int, limit: int, number: int | None = None
) -> list[StoredResult]:
    which = _AFTER if number is None else _AFTER_IN_ROUND
    found = connection.execute(which, {"seq": seq, "limit": limit, "number": number})
    return [_stored(*row) for row in found]


def _stored(
    seq: int, round_id: str, nonce: int, value: str | None, error: str | None, distance: int
) -> StoredResult:
    if distance and value is not None:
        return StoredResult(seq, round_id, nonce, distance=float(value))
    return StoredResult(seq, round_id, nonce, value, error)


# -- roots -----------------------------------------------------------------------------------------

# (seq, nonce, value): the vector as stored, None for a nonce that failed.
_StoredNonce = tuple[int, int, str | None]
_COMMITTED = """
    SELECT node_id, node_count, group_id, n_groups, batch_size, next_index
    FROM rounds WHERE number = :number AND commits_roots
"""
# One lookup in the index by nonce: all nonces of a round are of one lane, so in its order.
_OF_BATCH = """
    SELECT seq, nonce, value FROM results WHERE round = ? AND nonce BETWEEN ? AND ? ORDER BY nonce
"""
_LAST_ROOT = "SELECT root FROM batches WHERE round = ? ORDER BY first_index DESC LIMIT 1"
_ADD_BATCH = "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)"


def _add_batches(connection: Connection, round_number: int, next_index: int) -> None:
    """Store the roots of the results between the round's progress and ``next_index``.

    They are of the rows as stored, in the transaction that stores them. No change for a round that
    publishes vectors. Raises ValueError for a batch without a result for each of its nonces.
    """
    found = named_rows(connection, _COMMITTED, {"number": round_number})
    if not found:
        return
    lane, batch_size, start = _lane(found[0]), found[0]["batch_size"], found[0]["next_index"]
    row = connection.execute(_LAST_ROOT, (round_number,)).fetchone()
    previous = None if row is None else row[0]
    for first in range(start, next_index, batch_size):
        nonces = lane.batch(first, min(batch_size, next_index - first))
        stored = _results_of(connection, round_number, nonces)
        if tuple(nonce for _, nonce, _ in stored) != nonces:
            raise ValueError(f"the batch at lane index {first} lacks results")
        top = root(_leaves(stored))
        last_seq = max(seq for seq, *_ in stored)
        connection.execute(_ADD_BATCH, (round_number, first, len(nonces), top, previous, last_seq))
        previous = top


def _results_of(
    connection: Connection, round_number: int, nonces: Sequence[int]
) -> list[_StoredNonce]:
    """The results of a batch's ``nonces`` that are not deleted, in their order."""
    place = (round_number, nonces[0], nonces[-1])
    return connection.execute(_OF_BATCH, place).fetchall()


def _leaves(stored: Sequence[_StoredNonce]) -> list[bytes]:
    return [leaf(nonce, base64.b64decode(value or "")) for _, nonce, value in stored]


# -- openings --------------------------------------------------------------------------------------

# The most round ids that an error names.
_NAMED = 10
_OF_BLOCK = """
    SELECT commits_roots, round_id, next_index, node_id, node_count, group_id, n_groups FROM rounds
    WHERE block_hash = :block_hash AND public_key = :public_key
      AND round_id = coalesce(:round_id, round_id)
    ORDER BY number
"""
_BATCH_OF = """
    SELECT rounds.number, first_index, count, root, previous_root
    FROM batches JOIN rounds ON rounds.number = batches.round
    WHERE round_id = ? AND first_index <= ? ORDER BY first_index DESC LIMIT 1
"""


def _index(committed: CommittedRound, nonce: int) -> int:
    index = committed.lane.index_of(nonce)
    if index is None or index >= committed.next_index:
        raise Refused(
            Refusal.UNKNOWN_NONCE, f"nonce {nonce} is in no batch of round {committed.round_id} yet"
        )
    return index


def _open_batch(
    connection: Connection, committed: CommittedRound, indices: Sequence[int]
) -> list[Opening]:
    """Open the first of ``indices``, which rise, and all others that are in its batch."""
    row = connection.execute(_BATCH_OF, (committed.round_id, indices[0])).fetchone()
    if row is None:
        raise Refused(Refusal.UNKNOWN_ROUND, f"round {committed.round_id} is deleted")
    batch = CommittedBatch(*row[1:])
    nonces = committed.lane.batch(batch.first_index, batch.count)
    stored = _results_of(connection, row[0], nonces)
    asked = [index for index in indices if index < batch.first_index + batch.count]
    places = [index - batch.first_index for index in asked]
    if len(stored) < batch.count:
        raise Refused(
            Refusal.VECTORS_DELETED,
            f"the vectors of the batch of nonce {nonces[places[0]]} are deleted: a node keeps them"
            " for POC_OUTBOX_KEEP_DAYS after it delivered their root",
        )
    ways = paths(_leaves(stored), places)
    return [
        Opening(nonces[place], stored[place][2] or "", index, batch, way)
        for index, place, way in zip(asked, places, ways, strict=True)
    ]
