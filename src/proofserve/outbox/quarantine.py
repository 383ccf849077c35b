"""A damaged outbox is renamed and never written to again, so that an operator can recover it."""

import itertools
import logging
import sqlite3
from pathlib import Path

# The first bytes of every SQLite file; a file without them is not a damaged outbox.
_MAGIC = b"SQLite format 3\0"
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
# Endings of a database's files: itself, changes that are not in it yet, and their index.
_PARTS = ("", "-wal", "-shm")

_log = logging.getLogger(__name__)


def require_sound(connection: sqlite3.Connection) -> None:
    """Raise sqlite3.DatabaseError for a file that cannot be read to its end.

    Reads the whole file: about a second for each gigabyte.
    """
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        error = sqlite3.DatabaseError(verdict)
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        error.sqlite_errorname = "SQLITE_CORRUPT"
        raise error


def is_damage(path: Path, error: sqlite3.Error) -> bool:
    """Whether ``error`` says that the database ``path`` is damaged."""
    # The lowest byte is the kind of error.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code not in _DAMAGE:
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def rename_damaged(path: Path, error: sqlite3.Error) -> Path:
    """Rename a closed database and its other files to a free name. Raises OSError."""
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    kept = next(name for name in names if not name.exists())
    for part in _PARTS:
        source = path.with_name(path.name + part)
        if source.exists():
            source.rename(kept.with_name(kept.name + part))
    _log.error(
        "the outbox %s is damaged (%s) and was renamed to %s; the server begins a new one."
        " `sqlite3 %s .recover` may still read the old one",
        path,
        error,
        kept,
        kept,
    )
    return kept
