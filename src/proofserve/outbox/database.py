"""One SQLite file behind one thread, so that the event loop never waits for a disk."""

import asyncio
import fcntl
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from importlib import resources
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

from proofserve.outbox import quarantine
from proofserve.rounds.errors import OutboxUnavailable

SCHEMA_VERSION = 4

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


class NotAnOutbox(OutboxUnavailable):
    """The file is a database of something else, or of a newer proofserve. It was not touched."""


class OutboxInUse(OutboxUnavailable):
    """Another server uses the file. It was not touched."""


class Database:
    """Runs transactions one after another on a thread of its own."""

    def __init__(
        self, path: Path, connection: sqlite3.Connection, lock: BinaryIO, thread: ThreadPoolExecutor
    ) -> None:
        self._path = path
        self._connection = connection
        self._lock = lock
        self._thread = thread
        self._closed = False

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Open ``path``, or create it with the present schema.

        A damaged file is renamed, and a new one is created.

        Raises:
            NotAnOutbox: the file belongs to something else or to a newer version.
            OutboxInUse: another server works with it.
            OutboxUnavailable: it cannot be opened or created.
        """
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outbox")
        loop = asyncio.get_running_loop()
        try:
            connection, lock = await loop.run_in_executor(thread, _locked, path)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(path, connection, lock, thread)

    async def read(self, work: Work[T]) -> T:
        """Run ``work`` in a transaction and return its result. Raises OutboxUnavailable.

        Here and in ``write`` a cancelled call may still run to its end; calls keep their order.
        """
        return await self._run("BEGIN", work)

    async def write(self, work: Work[T]) -> T:
        """As ``read``; afterwards all changes of ``work`` are on disk, or none of them."""
        return await self._run("BEGIN IMMEDIATE", work)

    async def rewrite_version(self) -> None:
        """Store the version of the schema again: a write that changes nothing."""
        await self.write(lambda c: c.execute(f"PRAGMA user_version = {SCHEMA_VERSION}"))

    async def close(self) -> None:
        """Finish what is queued and close the file; twice is harmless."""
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=True)

    def _close(self) -> None:
        with self._lock:
            self._connection.close()

    async def _run(self, begin: str, work: Work[T]) -> T:
        if self._closed:
            raise OutboxUnavailable(f"the outbox {self._path} is closed")
        job = partial(_transact, self._connection, begin, work)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, job)
        except sqlite3.Error as error:
            raise unavailable(self._path, error) from error


def _transact(connection: sqlite3.Connection, begin: str, work: Work[T]) -> T:
    connection.execute(begin)
    try:
        result = work(connection)
        connection.commit()
    except BaseException:
        # SQLite itself has rolled back after some errors, a full disk among them; a second
        # rollback does nothing then.
        connection.rollback()
        raise
    return result


def hold_lock(path: Path) -> BinaryIO:
    """Keep other servers off the outbox until the returned file is closed or this process ends.

    A second server would end the round of the first, and send all of its callbacks once more.

    Raises:
        NotAnOutbox: the file belongs to something else or to a newer version.
        OutboxInUse: another server holds the lock.
        OutboxUnavailable: the outbox or its lock file cannot be opened.
    """
    _require_own(path)
    # SQLite's locks would not do: they end when any file handle of the process on it is closed.
    try:
        file = path.with_name(f"{path.name}.lock").open("ab")
    except OSError as error:
        raise OutboxUnavailable(f"the outbox {path} failed: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise OutboxInUse(
                f"another running server uses the outbox {path}: stop that server,"
                " or give this one another file with POC_OUTBOX"
            ) from error
        raise OutboxUnavailable(f"the outbox {path} failed: {error}") from error
    return file


def _require_own(path: Path) -> None:
    """Raise for a folder or file that is no outbox, before a lock file appears beside it."""
    if path.is_dir():
        raise OutboxUnavailable(f"the outbox {path} is a folder: name a file, with POC_OUTBOX")
    if not path.exists():
        return
    # Immutable: reads without leaving SQLite's own files there. Its WAL is examined later.
    uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            version_of(path, connection)
    except sqlite3.Error as error:
        if not quarantine.is_damage(path, error):
            raise unavailable(path, error) from error


def _locked(path: Path) -> tuple[sqlite3.Connection, BinaryIO]:
    lock = hold_lock(path)
    try:
        return _connect(path), lock
    except BaseException:
        lock.close()
        raise


def _connect(path: Path) -> sqlite3.Connection:
    try:
        _examine(path)
    except sqlite3.Error as error:
        if not quarantine.is_damage(path, error):
            raise unavailable(path, error) from error
        quarantine.put_aside(path, error)
    try:
        return _opened(path)
    except sqlite3.Error as error:
        raise unavailable(path, error) from error


def _examine(path: Path) -> None:
    """Raise an error for an existing file that is damaged or no outbox."""
    if not path.is_file():
        return
    # Read-only: closing an ordinary connection would write the WAL of a killed server into a
    # damaged file.
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as connection:
        version_of(path, connection)
        quarantine.require_sound(connection)


def _opened(path: Path) -> sqlite3.Connection:
    # We begin and end transactions ourselves: Python would begin them too late for reads.
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        _prepare(path, connection)
    except BaseException:
        connection.close()
        raise
    return connection


def version_of(path: Path, connection: sqlite3.Connection) -> int:
    """The version of the schema in ``path``, 0 for a file without tables. Raises NotAnOutbox."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise NotAnOutbox(
            f"the outbox {path} has version {version}, this proofserve knows up to "
            f"{SCHEMA_VERSION}: use the newer proofserve or another file"
        )
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version == 0 and tables:
        raise NotAnOutbox(f"{path} is a database of something else: choose another file")
    return int(version)


def unavailable(path: Path, error: sqlite3.Error) -> OutboxUnavailable:
    """An error of SQLite about ``path``, as our own error."""
    code = getattr(error, "sqlite_errorname", type(error).__name__)
    return OutboxUnavailable(f"the outbox {path} failed: {error} ({code})")


def _prepare(path: Path, connection: sqlite3.Connection) -> None:
    version = version_of(path, connection)
    # Before anything is in the file, or it has no effect: deleted results make the file smaller.
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    # WAL alone may lose the last commits with the power; a result counts only once it is on disk.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    # Each step is a script of its own, so a file of any age arrives at the present.
    for step in range(version + 1, SCHEMA_VERSION + 1):
        script = resources.files(__package__).joinpath(f"schema/{step}.sql").read_text("utf-8")
        connection.executescript(f"BEGIN IMMEDIATE;\n{script}\nCOMMIT;")
