"""Reads the artifacts in a receiver's file for a validator, also while a receiver uses the file."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from proofserve.receiver.database import ReceiverFileError

_MAGIC = b"SQLite format 3\0"
_SOURCES = "SELECT block_hash, public_key, count(*) FROM artifacts GROUP BY 1, 2 ORDER BY 1, 2"
_ARTIFACTS = (
    "SELECT nonce, vector_b64 FROM artifacts WHERE block_hash = ? AND public_key = ? ORDER BY nonce"
)

# A block hash and a public key.
Source = tuple[str, str]


def is_database(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


class ReceivedArtifacts:
    """The artifacts of one receiver's file; made by ``reading``."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def counts(self) -> dict[Source, int]:
        return {(block, key): count for block, key, count in self._connection.execute(_SOURCES)}

    def of(self, source: Source) -> list[tuple[int, str]]:
        return self._connection.execute(_ARTIFACTS, source).fetchall()


@contextmanager
def reading(path: Path) -> Iterator[ReceivedArtifacts]:
    """Open ``path`` read-only. Opening and reading raise ReceiverFileError."""
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            yield ReceivedArtifacts(connection)
    except sqlite3.Error as error:
        raise ReceiverFileError(f"{path} is not a file of `proofserve receive`: {error}") from error
