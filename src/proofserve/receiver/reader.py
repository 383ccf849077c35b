"""The receiver's SQLite file: its tables, its connections, and what validators read in it."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from proofserve.protocol.commitments import CommittedBatch
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.receipts.record import SignedEntry
from proofserve.wire.signed import signed_entry

# Files of older versions were never released.
_VERSION = 4
_MAGIC = b"SQLite format 3\0"
_SOURCES = "SELECT block_hash, public_key, count(*) FROM artifacts GROUP BY 1, 2 ORDER BY 1, 2"
_ARTIFACTS = (
    "SELECT nonce, vector_b64, sequence FROM artifacts JOIN callbacks ON callbacks.id = callback"
    " WHERE block_hash = ? AND public_key = ? ORDER BY nonce"
)
_ROUNDS = """
    SELECT number, block_hash, public_key, round_id, block_height, node_id, node_count, group_id,
           n_groups, scheme, k_dim, seq_len
    FROM committed_rounds ORDER BY number
"""
_ROOTS = """
    SELECT first_index, count, root, previous_root FROM roots WHERE round = ? ORDER BY first_index
"""
_ENTRIES = """
    SELECT body, received_at FROM log_entries
    WHERE public_key = :key AND number BETWEEN :first AND :last ORDER BY number
"""
_FORKED = """
    SELECT body, received_at FROM log_entries WHERE public_key = :key AND number IN (
        SELECT number FROM log_entries WHERE fork = 1 AND public_key = :key AND number >= :first)
    ORDER BY number, received_at
"""

# A block hash and a public key.
Source = tuple[str, str]


class ReceiverFileError(Exception):
    """The file cannot be opened, or belongs to another program or another version."""


def connect(path: Path) -> sqlite3.Connection:
    """A connection for several threads, one at a time. Raises ReceiverFileError."""
    try:
        # We begin transactions ourselves: Python would begin them too late for reads.
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise ReceiverFileError(f"cannot open {path}: {error}") from error
    try:
        _prepare(connection)
    except (sqlite3.Error, ReceiverFileError) as error:
        connection.close()
        raise ReceiverFileError(f"cannot use {path}: {error}") from error
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version > _VERSION:
        raise ReceiverFileError(f"it has version {version}, this proofserve reads up to {_VERSION}")
    if version == 0 and tables:
        raise ReceiverFileError("it is a database of another program")
    if 0 < version < _VERSION:
        raise ReceiverFileError(f"it has version {version}, this proofserve reads {_VERSION} only")
    connection.execute("PRAGMA journal_mode = WAL")
    # The sender never repeats a callback after a 200, so the callback must be on disk by then.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    if version == 0:
        script = resources.files(__package__).joinpath("schema.sql").read_text("utf-8")
        end = f"PRAGMA user_version = {_VERSION};\nCOMMIT;"
        connection.executescript(f"BEGIN IMMEDIATE;\n{script}\n{end}")


@dataclass(frozen=True, slots=True)
class ReceivedRound:
    """A round of which roots came; ``width`` is the number of values per nonce."""

    number: int
    block_hash: str
    public_key: str
    round_id: str
    block_height: int
    lane: NonceLane
    scheme: str
    width: int
    seq_len: int


def is_database(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


class ReceivedArtifacts:
    """The contents of one receiver's file; made by ``reading``."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def counts(self) -> dict[Source, int]:
        return {(block, key): count for block, key, count in self._connection.execute(_SOURCES)}

    def rounds(self) -> list[ReceivedRound]:
        """The rounds with roots."""
        rows = self._connection.execute(_ROUNDS)
        return [
            ReceivedRound(
                number, block, key, round_id, height, NonceLane(*lane), scheme, width, seq
            )
            for number, block, key, round_id, height, *lane, scheme, width, seq in rows
        ]

    def batches(self, number: int) -> list[CommittedBatch]:
        """The batches of a round in the order of its lane."""
        return [CommittedBatch(*row) for row in self._connection.execute(_ROOTS, (number,))]

    def of(self, source: Source) -> list[tuple[int, str, int | None]]:
        """Each nonce with its vector, and the number that the node gave the callback with it."""
        return self._connection.execute(_ARTIFACTS, source).fetchall()

    def log(self, public_key: bytes, first: int, last: int) -> list[tuple[SignedEntry, float]]:
        """The entries of a node's log with indices ``first`` to ``last``, as far as they came.

        With the Unix time in seconds at which each came. They are as the file has them: nothing is
        verified.
        """
        return self._entries(_ENTRIES, {"key": public_key.hex(), "first": first, "last": last})

    def forked(self, public_key: bytes, first: int) -> list[SignedEntry]:
        """The entries, from index ``first``, that have another one with their index beside them."""
        found = self._entries(_FORKED, {"key": public_key.hex(), "first": first})
        return [entry for entry, _ in found]

    def _entries(self, query: str, values: Mapping[str, object]) -> list[tuple[SignedEntry, float]]:
        try:
            rows = self._connection.execute(query, values)
            return [(signed_entry(json.loads(body)), at) for body, at in rows]
        except ValueError as error:
            raise ReceiverFileError(f"an entry of a log in the file is damaged: {error}") from error


@contextmanager
def reading(path: Path) -> Iterator[ReceivedArtifacts]:
    """Open ``path`` read-only. Opening and reading raise ReceiverFileError."""
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            yield ReceivedArtifacts(connection)
    except sqlite3.Error as error:
        raise ReceiverFileError(f"{path} is not a file of `proofserve receive`: {error}") from error
