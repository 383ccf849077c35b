"""Access to an outbox file for commands; a server may have it open.

Commands do not create, migrate or rename the file; only the server does.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from proofserve.outbox import pruning, quarantine
from proofserve.outbox.database import (
    SCHEMA_VERSION,
    NotAnOutbox,
    OutboxInUse,
    connect,
    hold_lock,
    unavailable,
    version_of,
)
from proofserve.outbox.pruning import Pruned
from proofserve.rounds.errors import OutboxUnavailable

# Inode, size, time of the last change, and whether a WAL exists: a process has the file open, or
# was killed while it had.
_FileState = tuple[int, int, int, bool]


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection to a file, which is checked for damage first.

    Each statement sees the newest state, unless the caller begins a transaction.

    Raises NotAnOutbox (the file belongs to another program or another version) and
    OutboxUnavailable (it is missing or damaged, cannot be read, or a server opened it meanwhile, so
    that the values may be inconsistent).
    """
    before = _state_of(path)
    *_, in_use = before
    # An ordinary connection would leave two files beside an outbox that no process has open.
    mode = "mode=ro" if in_use else "mode=ro&immutable=1"
    try:
        with closing(connect(path, mode)) as connection:
            _require_readable(path, connection)
            yield connection
    except sqlite3.Error as error:
        _require_unchanged(path, before)
        raise _failure(path, error) from error
    _require_unchanged(path, before)


@contextmanager
def writing(path: Path) -> Iterator[sqlite3.Connection]:
    """A transaction in an undamaged file. It is on disk when the context ends without an error.

    The server's transactions and this one wait for each other. Raises as ``reading``.
    """
    with reading(path):
        pass
    try:
        with closing(connect(path, "mode=rw")) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                yield connection
    except sqlite3.Error as error:
        raise _failure(path, error) from error


def prune(path: Path, before: float) -> tuple[Pruned, bool]:
    """Delete what was delivered before ``before``, in wall-clock seconds.

    Returns the deleted numbers, and whether the file has shrunk. A file of an older version must be
    rewritten once, while no server uses it. Raises as ``reading``.
    """
    with reading(path) as connection:
        at_first = pruning.totals(connection)
    with ExitStack() as held:
        is_alone = False
        with suppress(OutboxInUse):
            held.enter_context(hold_lock(path))
            is_alone = True
        try:
            connection = held.enter_context(closing(connect(path, "mode=rw")))
            _in_steps(connection, partial(pruning.step, before=before))
            shrinks = pruning.shrinks(connection)
            if shrinks:
                _in_steps(connection, pruning.shrink)
            elif is_alone:
                pruning.rewrite(connection)
            return pruning.totals(connection).since(at_first), shrinks or is_alone
        except sqlite3.Error as error:
            raise _failure(path, error) from error


def _in_steps(connection: sqlite3.Connection, step: Callable[[sqlite3.Connection], bool]) -> None:
    again = True
    while again:
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            again = step(connection)
        # A waiting server tries again and again to lock the file: this pause lets it succeed.
        time.sleep(pruning.PAUSE_S)


def _state_of(path: Path) -> _FileState:
    try:
        found = path.stat()
    except FileNotFoundError:
        raise OutboxUnavailable(
            f"there is no outbox {path}: name the file of the server, --outbox FILE or POC_OUTBOX"
        ) from None
    except OSError as error:
        raise OutboxUnavailable(f"cannot read the outbox {path}: {error.strerror}") from error
    in_use = path.with_name(f"{path.name}-wal").exists()
    return found.st_ino, found.st_size, found.st_mtime_ns, in_use


def _require_unchanged(path: Path, before: _FileState) -> None:
    """Raise if a server opened the file: an immutable file is read without locks."""
    *_, in_use = before
    if not in_use and _state_of(path) != before:
        raise OutboxUnavailable(f"a server opened the outbox {path} meanwhile: run this again")


def _require_readable(path: Path, connection: sqlite3.Connection) -> None:
    version = version_of(path, connection)
    if version == 0:
        raise NotAnOutbox(f"the outbox {path} is empty: no server has used it yet")
    if version < SCHEMA_VERSION:
        raise NotAnOutbox(
            f"the outbox {path} has version {version}, this command reads {SCHEMA_VERSION}:"
            " the server of this version migrates it when it starts"
        )
    quarantine.require_sound(connection)


def _failure(path: Path, error: sqlite3.Error) -> OutboxUnavailable:
    if not quarantine.is_damage(path, error):
        return unavailable(path, error)
    return OutboxUnavailable(
        f"the outbox {path} is damaged ({error}) and was not changed. The server renames it"
        f" when it starts; `sqlite3 {path} .recover` may still read it"
    )
