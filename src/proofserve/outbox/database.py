"""One SQLite file behind one thread, so that the event loop never waits for a disk.

A damaged file is renamed and never written to again, so that an operator can recover it.
"""

import asyncio
import fcntl
import functools
import itertools
import logging
import sqlite3
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from proofserve.rounds.errors import OutboxUnavailable

SCHEMA_VERSION = 6
# Pause between two steps that delete, which leaves nine tenths of the time to results and
# callbacks. Seconds.
PAUSE_S = 0.05

# The first bytes of every SQLite file; a file without them is not a damaged outbox.
_MAGIC = b"SQLite format 3\0"

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[Concatenate[sqlite3.Connection, P], T]
# A database, and its connections.
D = TypeVar("D", bound="AnyDatabase")
C = TypeVar("C")

_log = logging.getLogger(__name__)


class OutboxInUse(OutboxUnavailable):
    """Another server uses the file. It was not changed."""


@dataclass(slots=True)
class Database:
    """Runs transactions one after another on one thread of its own."""

    _path: Path
    _connection: sqlite3.Connection
    _lock: BinaryIO
    _thread: ThreadPoolExecutor
    _closed: bool = False

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Open ``path``, or create it. A damaged file is renamed, and a new one is created.

        Raises OutboxInUse (another server uses it) and OutboxUnavailable (it belongs to another
        program or to another version, or cannot be opened or created).
        """
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outbox")
        loop = asyncio.get_running_loop()
        try:
            connection, lock = await loop.run_in_executor(thread, _locked, path)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(path, connection, lock, thread)

    async def read(self, work: Work[P, T], *args: P.args, **kw: P.kwargs) -> T:
        """Run ``work`` in a transaction and return its result. Raises OutboxUnavailable.

        Here and in ``write`` a cancelled call may still complete; calls keep their order.
        """
        return await self._run("BEGIN", lambda c: work(c, *args, **kw))

    async def write(self, work: Work[P, T], *args: P.args, **kw: P.kwargs) -> T:
        """As ``read``; then all changes of ``work`` are on disk, or none of them."""
        return await self._run("BEGIN IMMEDIATE", lambda c: work(c, *args, **kw))

    async def delete(self, *steps: Callable[[sqlite3.Connection], int]) -> int:
        """Repeat each step, in a transaction of its own, until it returns 0. Returns their sum.

        A step takes some milliseconds; the pauses leave most of the time to other transactions.
        """
        done = 0
        for step in steps:
            while found := await self.write(step):
                done += found
                await asyncio.sleep(PAUSE_S)
        return done

    async def close(self) -> None:
        """Finish queued transactions and close the file. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=True)

    def _close(self) -> None:
        with self._lock:
            self._connection.close()

    async def _run(self, begin: str, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._closed:
            raise OutboxUnavailable(f"the outbox {self._path} is closed")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._transact, begin, work)
        except sqlite3.Error as error:
            raise unavailable(self._path, error) from error

    def _transact(self, begin: str, work: Callable[[sqlite3.Connection], T]) -> T:
        self._connection.execute(begin)
        try:
            result = work(self._connection)
            self._connection.commit()
        except BaseException:
            # After a full disk SQLite has already rolled back; a second rollback does nothing.
            self._connection.rollback()
            raise
        return result


class AnyDatabase(Protocol):
    """Runs ``work`` with a connection, in a transaction: as ``Database``, or as that of a fleet."""

    async def read(self, work: Callable[..., T], *args: Any, **kw: Any) -> T: ...

    async def write(self, work: Callable[..., T], *args: Any, **kw: Any) -> T: ...


@dataclass(eq=False, repr=False)
class StorePart(Generic[D]):
    """Some of the methods of a store; each is one transaction.

    ``clock`` gives wall-clock seconds. ``news`` is set when the sender of callbacks may have work.
    Every method raises OutboxUnavailable if the database fails: then nothing is changed.
    """

    database: D
    clock: Callable[[], float]
    news: asyncio.Event


def kept(text: str, most: int = 500) -> str:
    """The first ``most`` characters. PostgreSQL stores no NUL, no database half a surrogate."""
    return text[:most].replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


S = TypeVar("S", bound=StorePart[Any])
# A method that runs in a thread, inside a transaction, and the same one for the event loop.
Step = Callable[Concatenate[S, C, P], T]
Method = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def reads(work: Step[S, C, P, T]) -> Method[S, P, T]:
    """Makes ``work`` a method that runs on one snapshot."""

    @functools.wraps(work)
    async def method(self: S, /, *args: P.args, **kw: P.kwargs) -> T:
        found: T = await self.database.read(lambda c: work(self, c, *args, **kw))
        return found

    return method


def writes(work: Step[S, C, P, T]) -> Method[S, P, T]:
    """Makes ``work`` a method whose changes are all on disk when it returns."""

    @functools.wraps(work)
    async def method(self: S, /, *args: P.args, **kw: P.kwargs) -> T:
        found: T = await self.database.write(lambda c: work(self, c, *args, **kw))
        return found

    return method


def announces(work: Step[S, C, P, T]) -> Method[S, P, T]:
    """As ``writes``; then wakes the sender, also after an error: the rows may be stored."""
    write = writes(work)

    @functools.wraps(work)
    async def method(self: S, /, *args: P.args, **kw: P.kwargs) -> T:
        try:
            return await write(self, *args, **kw)
        finally:
            self.news.set()

    return method


def unavailable(path: Path, error: sqlite3.Error) -> OutboxUnavailable:
    code = getattr(error, "sqlite_errorname", type(error).__name__)
    return OutboxUnavailable(f"the outbox {path} failed: {error} ({code})")


# -- the lock --------------------------------------------------------------------------------------


def hold_lock(path: Path) -> BinaryIO:
    """Lock the outbox against other servers until the returned file or this process is closed.

    A second server would end the round of the first, and send all of its callbacks once more.

    Raises as ``Database.open``.
    """
    _require_own(path)
    # SQLite's own locks end as soon as the process closes any handle of the file.
    try:
        with ExitStack() as opened:
            file = opened.enter_context(_lock_file(path).open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            opened.pop_all()
            return file
    except BlockingIOError as error:
        raise OutboxInUse(
            f"another running server uses the outbox {path}: stop that server,"
            " or give this one another file with POC_OUTBOX"
        ) from error
    except OSError as error:
        raise OutboxUnavailable(f"the outbox {path} failed: {error}") from error


def is_locked(path: Path) -> bool:
    """Whether a process has the lock of ``hold_lock``."""
    try:
        with _lock_file(path).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # The folder is gone, for example: an attempt to open the outbox says so.
        return False
    return False


def _lock_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _require_own(path: Path) -> None:
    """Raise for a folder or file that is not an outbox, before a lock file is made beside it."""
    if path.is_dir():
        raise OutboxUnavailable(f"the outbox {path} is a folder: name a file, with POC_OUTBOX")
    if not path.exists():
        return
    try:
        # Immutable: SQLite then creates no files beside it. Its WAL is examined later.
        with closing(connect(path, "mode=ro&immutable=1")) as connection:
            version_of(path, connection)
    except sqlite3.Error as error:
        if not is_damage(path, error):
            raise unavailable(path, error) from error


# -- opening ---------------------------------------------------------------------------------------


def _locked(path: Path) -> tuple[sqlite3.Connection, BinaryIO]:
    with ExitStack() as opened:
        lock = opened.enter_context(hold_lock(path))
        try:
            _rename_damaged(path)
            connection = connect(path, "mode=rwc")
            opened.callback(connection.close)
            _prepare(path, connection)
        except sqlite3.Error as error:
            raise unavailable(path, error) from error
        opened.pop_all()
        return connection, lock


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """``mode`` is in the form of SQLite's URIs, like ``mode=ro``."""
    # We begin and end transactions ourselves: Python would begin them too late for reads.
    uri = f"{path.absolute().as_uri()}?{mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None)


def named_rows(
    connection: sqlite3.Connection, sql: str, values: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What a statement finds, by the names of its columns."""
    cursor = connection.cursor()
    cursor.row_factory = sqlite3.Row
    return [dict(row) for row in cursor.execute(sql, values)]


def version_of(path: Path, connection: sqlite3.Connection) -> int:
    """The schema's version, or 0. Raises OutboxUnavailable for another version or program."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise OutboxUnavailable(
            f"the outbox {path} has version {version}, this proofserve reads up to "
            f"{SCHEMA_VERSION}: use the newer proofserve or another file"
        )
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version == 0 and tables:
        raise OutboxUnavailable(f"{path} is a database of another program: choose another file")
    if 0 < version < SCHEMA_VERSION:
        raise OutboxUnavailable(
            f"the outbox {path} has version {version}, this proofserve reads {SCHEMA_VERSION} only:"
            " have the older one send what the file holds, then move it away, or choose another"
            " file"
        )
    return int(version)


def _prepare(path: Path, connection: sqlite3.Connection) -> None:
    version = version_of(path, connection)
    # With this, deleted results make the file smaller. It only has an effect on an empty file.
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    # WAL alone may lose the last commits in a power failure; results must be on disk to count.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    if version == 0:
        script = resources.files(__package__).joinpath("schema/outbox.sql").read_text("utf-8")
        end = f"PRAGMA user_version = {SCHEMA_VERSION};\nCOMMIT;"
        connection.executescript(f"BEGIN IMMEDIATE;\n{script}\n{end}")


# -- damage ----------------------------------------------------------------------------------------


def require_sound(connection: sqlite3.Connection) -> None:
    """Raise sqlite3.DatabaseError for a damaged file. Reads it all, about 1 s for each gigabyte."""
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        error = sqlite3.DatabaseError(verdict)
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        error.sqlite_errorname = "SQLITE_CORRUPT"
        raise error


def is_damage(path: Path, error: sqlite3.Error) -> bool:
    # The lowest byte is the kind of error.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code not in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _rename_damaged(path: Path) -> None:
    """Rename a damaged file and those beside it. Raises OutboxUnavailable and OSError."""
    if not path.is_file():
        return
    try:
        # Read-only: closing another connection would write a killed server's WAL into the file.
        with closing(connect(path, "mode=ro")) as connection:
            version_of(path, connection)
            require_sound(connection)
    except sqlite3.Error as error:
        if not is_damage(path, error):
            raise
        names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
        kept = next(name for name in names if not name.exists())
        # The file itself, changes that are not in it yet, and their index.
        for part in ("", "-wal", "-shm"):
            source = path.with_name(path.name + part)
            if source.exists():
                source.rename(kept.with_name(kept.name + part))
        text = (
            "the outbox %s is damaged (%s) and was renamed to %s; the server begins a new one."
            " `sqlite3 %s .recover` may still read the old one"
        )
        _log.error(text, path, error, kept, kept)
