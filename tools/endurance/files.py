"""Reads the files of a deployment after a trial, without the code that wrote them."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from proofserve.rounds.records import StoredResult

# No row may refer to a missing row, be undelivered or still be open.
_LEFTOVERS = """
    SELECT (SELECT count(*) FROM results WHERE round NOT IN (SELECT number FROM rounds))
         + (SELECT count(*) FROM deliveries
            WHERE round IS NOT NULL AND round NOT IN (SELECT number FROM rounds))
         + (SELECT count(*) FROM deliveries WHERE state <> 'done')
         + (SELECT count(*) FROM rounds WHERE NOT closed)
         + (SELECT count(*) FROM rounds WHERE url IS NOT NULL AND last_seq > cut_seq)
"""
# The nonces of both protocols, with their values as the outbox holds them.
_RECEIVED = """
    SELECT block_hash, nonce, vector_b64 FROM artifacts
    UNION ALL SELECT block_hash, nonce, distance FROM winners
"""
_ROUNDS = "SELECT round_id, url FROM rounds WHERE url LIKE ?"
_PROOFS = """
    SELECT block_hash, round_id, nonce, value, r_target IS NOT NULL
    FROM results JOIN rounds ON rounds.number = results.round
    WHERE value IS NOT NULL AND url LIKE ?
"""
_AGAIN = "SELECT coalesce(sum(received - artifacts - winners), 0) FROM sources"
_REPEATS = "SELECT coalesce(sum(repeats), 0) FROM callbacks"

Proof = tuple[str, int, str | float]


@dataclass(frozen=True, slots=True)
class Account:
    """The comparison of the node's and the receiver's file; a proof is (block, nonce, value).

    ``produced`` proofs are still in the outbox, ``missing`` of these are not at the receiver.
    ``foreign`` proofs are at the receiver only: as many as were deleted from the outbox after their
    delivery, if all is well. ``pruned`` counts deleted results of all callback URLs.
    ``duplicates`` are nonces that came in a callback of another key, or are twice in the outbox;
    ``repeats`` callbacks that were sent again under their key. ``leftovers`` are rows of the outbox
    that are undelivered, still open or belong to no round. ``damaged`` is what SQLite's check says.
    """

    produced: int
    missing: int
    foreign: int
    duplicates: int
    repeats: int
    rounds: int
    pruned: int
    pruned_rounds: int
    leftovers: int
    damaged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Delivered:
    """A node's file: the callback URL of each round by its id, and its proofs by round.

    ``leftovers`` and ``damaged`` as in an ``Account``.
    """

    rounds: dict[str, str]
    proofs: list[Proof]
    leftovers: int
    damaged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Received:
    """A receiver's file: its ``proofs``, and the ``keys`` of its callbacks.

    ``duplicates``, ``repeats`` and ``damaged`` as in an ``Account``.
    """

    proofs: frozenset[Proof]
    keys: frozenset[str]
    duplicates: int
    repeats: int
    damaged: tuple[str, ...]


def received(path: Path) -> Received:
    """Read a receiver's file; the receiver must have ended."""
    with closing(_open(path)) as file:
        keys = file.execute("SELECT idempotency_key FROM callbacks")
        return Received(
            proofs=frozenset(file.execute(_RECEIVED)),
            keys=frozenset(key for (key,) in keys),
            duplicates=_one(file, _AGAIN),
            repeats=_one(file, _REPEATS),
            damaged=tuple(_check(file)),
        )


def compare(outbox: Path, receiver_file: Path, url: str) -> Account:
    """Compare an outbox's results for ``url`` with the receiver's; both servers must have ended."""
    theirs = received(receiver_file)
    with closing(_open(outbox)) as ours:
        rows = _proofs(ours, url)
        sent = {(block, nonce, value) for block, _, nonce, value in rows}
        once = {(block, nonce, type(value)) for block, _, nonce, value in rows}
        return Account(
            produced=len(rows),
            missing=len(sent - theirs.proofs),
            foreign=len(theirs.proofs - sent),
            duplicates=theirs.duplicates + len(rows) - len(once),
            repeats=theirs.repeats,
            rounds=_one(ours, "SELECT count(*) FROM rounds"),
            pruned=_one(ours, "SELECT results FROM pruned"),
            pruned_rounds=_one(ours, "SELECT rounds FROM pruned"),
            leftovers=_one(ours, _LEFTOVERS),
            damaged=(*_check(ours), *theirs.damaged),
        )


def delivered(outbox: Path, url: str) -> Delivered:
    """What an outbox has for callback URLs that begin with ``url``; its node must have ended."""
    with closing(_open(outbox)) as file:
        return Delivered(
            rounds=dict(file.execute(_ROUNDS, (f"{url}%",)).fetchall()),
            proofs=[(r, nonce, value) for _, r, nonce, value in _proofs(file, f"{url}%")],
            leftovers=_one(file, _LEFTOVERS),
            damaged=tuple(_check(file)),
        )


def _proofs(file: sqlite3.Connection, url: str) -> list[tuple[str, str, int, str | float]]:
    """Block, round, nonce, and value of the results for a callback URL: text, or a distance."""
    return [
        (block, round_id, nonce, float(value) if winner else value)
        for block, round_id, nonce, value, winner in file.execute(_PROOFS, (url,))
    ]


def receipts(outbox: Path) -> set[str]:
    """The ids of the responses that have a receipt in the log."""
    with closing(sqlite3.connect(outbox)) as database:
        rows = database.execute("SELECT response_id FROM receipts WHERE entry IS NOT NULL")
        return {row[0] for row in rows}


def results(outbox: Path) -> list[StoredResult]:
    """Every result in the order of its sequence number."""
    with closing(_open(outbox)) as file:
        found = file.execute(
            "SELECT seq, round_id, nonce, value, error, r_target IS NOT NULL"
            " FROM results JOIN rounds ON rounds.number = results.round ORDER BY seq"
        )
        return [
            StoredResult(
                *(seq, round_id, nonce, None if winner else value, error),
                distance=float(value) if winner and value is not None else None,
            )
            for seq, round_id, nonce, value, error, winner in found
        ]


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True)


def _one(file: sqlite3.Connection, query: str) -> int:
    (count,) = file.execute(query).fetchone()
    return int(count)


def _check(file: sqlite3.Connection) -> list[str]:
    (said,) = file.execute("PRAGMA integrity_check").fetchone()
    return [] if said == "ok" else [str(said)]
