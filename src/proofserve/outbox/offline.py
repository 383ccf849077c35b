"""Access to an outbox by commands, while a server may have it open.

Only the server creates, migrates and quarantines files; commands do not.
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

# Inode, size, time of the last change; whether a process has it open or was killed with it open.
_Look = tuple[int, int, int, bool]


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that cannot write, to a file that was read to its end and found sound.

    Each statement sees the file as it is then, unless the caller begins a transaction.

    Raises NotAnOutbox (the file belongs to something else or to another version) and
    OutboxUnavailable (it is missing or damaged, cannot be read, or a server opened it meanwhile, so
    that what was read may not fit together).
    """
    before = _look(path)
    *_, in_use = before
    # An ordinary connection would leave two files beside an outbox that no process has open.
    mode = "mode=ro" if in_use else "mode=ro&immutable=1"
    try:
        with closing(connect(path, mode)) as connection:
            _require_readable(path, connection)
            yield connection
    except sqlite3.Error as error:
        _require_alone(path, before)
        raise _failure(path, error) from error
    _require_alone(path, before)


@contextmanager
def writing(path: Path) -> Iterator[sqlite3.Connection]:
    """A transaction in a sound file, on disk once the context ends; nothing of it after an error.

    It waits for the server's own, which are short, and the server for it. Raises as ``reading``.
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

    Returns how much that was, and whether the file is as small as it can be: one of an older
    version must be rewritten once, which needs the server to be stopped. Raises as ``reading``.
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
        # A server that waits for the file asks for it again and again: it must find a gap.
        time.sleep(pruning.PAUSE_S)


def _look(path: Path) -> _Look:
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


def _require_alone(path: Path, before: _Look) -> None:
    """Raise if a server came: an immutable file is read without locks, which would notice it."""
    *_, in_use = before
    if not in_use and _look(path) != before:
        raise OutboxUnavailable(f"a server opened the outbox {path} meanwhile: run this again")


def _require_readable(path: Path, connection: sqlite3.Connection) -> None:
    version = version_of(path, connection)
    if version == 0:
        raise NotAnOutbox(f"the outbox {path} is empty: no server has used it yet")
    if version < SCHEMA_VERSION:
        raise NotAnOutbox(
            f"the outbox {path} has version {version}, this command reads {SCHEMA_VERSION}:"
            " the next start of this proofserve's server brings it there"
        )
    quarantine.require_sound(connection)


def _failure(path: Path, error: sqlite3.Error) -> OutboxUnavailable:
    if not quarantine.is_damage(path, error):
        return unavailable(path, error)
    return OutboxUnavailable(
        f"the outbox {path} is damaged ({error}) and was left as it is. The server puts it aside"
        f" when it starts; `sqlite3 {path} .recover` may still read it"
    )
