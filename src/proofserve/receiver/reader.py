"""Reads artifacts, roots and logs of receipts in a receiver's file, also beside a receiver."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from proofserve.protocol.commitments import CommittedBatch
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.receipts.signature import SignedEntry
from proofserve.receiver.database import ReceiverFileError
from proofserve.wire.receipts import signed_entry

# The versions of the file's schema with the tables of roots, and of logs of receipts.
FIRST_WITH_ROOTS = 3
FIRST_WITH_LOGS = 4
_MAGIC = b"SQLite format 3\0"
_SOURCES = "SELECT block_hash, public_key, count(*) FROM artifacts GROUP BY 1, 2 ORDER BY 1, 2"
_ARTIFACTS = (
    "SELECT nonce, vector_b64 FROM artifacts WHERE block_hash = ? AND public_key = ? ORDER BY nonce"
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
    SELECT body FROM log_entries WHERE public_key = :key AND number BETWEEN :first AND :last
    ORDER BY number
"""
_FORKED = """
    SELECT body FROM log_entries WHERE public_key = :key AND number IN (
        SELECT number FROM log_entries WHERE fork = 1 AND public_key = :key AND number >= :first)
    ORDER BY number, received_at
"""

# A block hash and a public key.
Source = tuple[str, str]


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
        """The rounds with roots; none in a file that no receiver of this version has opened."""
        rows = self._connection.execute(_ROUNDS) if self._version >= FIRST_WITH_ROOTS else ()
        return [
            ReceivedRound(
                number, block, key, round_id, height, NonceLane(*lane), scheme, width, seq
            )
            for number, block, key, round_id, height, *lane, scheme, width, seq in rows
        ]

    def batches(self, number: int) -> list[CommittedBatch]:
        """The batches of a round in the order of its lane."""
        return [CommittedBatch(*row) for row in self._connection.execute(_ROOTS, (number,))]

    def of(self, source: Source) -> list[tuple[int, str]]:
        return self._connection.execute(_ARTIFACTS, source).fetchall()

    def log(self, public_key: bytes, first: int, last: int) -> list[SignedEntry]:
        """The entries of a node's log with indices ``first`` to ``last``, as far as they came.

        They are as the file has them: nothing is verified.
        """
        return self._entries(_ENTRIES, {"key": public_key.hex(), "first": first, "last": last})

    def forked(self, public_key: bytes, first: int) -> list[SignedEntry]:
        """The entries, from index ``first``, that have another one with their index beside them."""
        return self._entries(_FORKED, {"key": public_key.hex(), "first": first})

    @property
    def _version(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    def _entries(self, query: str, values: Mapping[str, object]) -> list[SignedEntry]:
        if self._version < FIRST_WITH_LOGS:
            return []
        try:
            rows = self._connection.execute(query, values)
            return [signed_entry(json.loads(body)) for (body,) in rows]
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
