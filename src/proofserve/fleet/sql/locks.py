"""Locks that a process holds while it lives, and what the one controller does that leads."""

import asyncio
import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import psycopg
from sqlalchemy import URL, Connection, text

from proofserve.fleet.sql.database import database_url, is_sqlite, shown

_log = logging.getLogger(__name__)

# The lock of the one controller that acts on the members.
LEADER: Final = "leader"
# The longest wait for PostgreSQL in seconds: without an answer the lock counts as lost.
_ANSWER_S = 3.0
# The server ends the connection of a machine that is gone, after some seconds, so that another
# process gets the lock.
_SESSION = (
    "SET tcp_keepalives_idle = 2; SET tcp_keepalives_interval = 1; SET tcp_keepalives_count = 3;"
    " SET statement_timeout = '3s'"
)
# How soon the work ends after the lock was lost, and begins after it was won, at the latest.
_LOOK_EVERY_S = 0.2


class AdvisoryLock:
    """A lock of PostgreSQL on a connection of its own, which lives as long as that."""

    def __init__(self, url: URL, key: int) -> None:
        self._key = key
        self._conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._connection: psycopg.AsyncConnection[tuple[bool]] | None = None

    async def take(self) -> bool:
        """Whether this process has the lock: taken before and not lost, or taken now."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                if self._connection is None:
                    return await self._try()
                # While the connection lives, so does the lock.
                await self._connection.execute("SELECT 1")
                return True
        except (psycopg.Error, OSError, TimeoutError) as error:
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            _log.warning("a lock of the fleet cannot be had: %s", first_line)
            await self.give_back()
            return False

    async def give_back(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _try(self) -> bool:
        connection = await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True)
        try:
            await connection.execute(_SESSION)
            cursor = await connection.execute("SELECT pg_try_advisory_lock(%s)", (self._key,))
            row = await cursor.fetchone()
            if row is not None and row[0]:
                self._connection = connection
                return True
        finally:
            if self._connection is not connection:
                await connection.close()
        return False


@dataclass(eq=False, repr=False)
class FileLock:
    """A lock on a file beside an SQLite database."""

    _path: Path
    keeps_file: bool
    _file: BinaryIO | None = None

    async def take(self) -> bool:
        """As that of an ``AdvisoryLock``."""
        try:
            if self._file is not None and self._is_ours(self._file):
                return True
            await self.give_back()
            with ExitStack() as opened:
                file = opened.enter_context(self._path.open("ab"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                opened.pop_all()
                self._file = file
        except BlockingIOError:
            return False
        except OSError as error:
            _log.warning("a lock of the fleet cannot be had: %s", error)
            return False
        return self._is_ours(self._file)

    async def give_back(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        if not self.keeps_file and self._is_ours(file):
            # No other process will ask for this name again.
            self._path.unlink()
        file.close()

    def _is_ours(self, file: BinaryIO) -> bool:
        """Whether the file was not deleted: another process would lock the next one."""
        try:
            there, ours = self._path.stat(), os.fstat(file.fileno())
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


ProcessLock = AdvisoryLock | FileLock


def process_lock(url: str, name: str) -> ProcessLock:
    """The lock ``name`` of a database, as ``FleetStore.open`` opens it.

    PostgreSQL: an advisory lock on a connection of its own. SQLite: a lock on ``<file>.<name>``.
    Raises ValueError for a URL of another kind.
    """
    parsed = database_url(url)
    if is_sqlite(parsed):
        return FileLock(_beside(parsed, name), keeps_file=name == LEADER)
    return AdvisoryLock(parsed, _key(name))


def is_held(connection: Connection, name: str) -> bool:
    """Whether a process holds the lock ``name`` of the database of ``connection``."""
    if connection.dialect.name == "sqlite":
        try:
            with _beside(connection.engine.url, name).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False
    chosen = text("SELECT pg_try_advisory_xact_lock(:key)")
    # Free until the caller's transaction ends.
    return not connection.execute(chosen, {"key": _key(name)}).scalar_one()


def _key(name: str) -> int:
    """The number by which PostgreSQL knows the lock ``name``."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _beside(url: URL, name: str) -> Path:
    """The file of a lock of an SQLite database."""
    file = Path(url.database or "")
    return file.with_name(f"{file.name}.{name}")


class Leadership:
    """Tries for the lock of the leader while ``run`` runs. Raises as ``process_lock``.

    ``changed`` is called in the event loop after each change of ``held``.
    """

    def __init__(
        self, url: str, interval_s: float = 1.0, changed: Callable[[], None] = lambda: None
    ) -> None:
        self._where = shown(database_url(url))
        self._lock = process_lock(url, LEADER)
        self._interval_s = interval_s
        self._changed = changed
        self.held = False
        """Whether this process leads, as far as it knows: a lost lock is noticed within 4 s."""

    async def run(self) -> None:
        """Hold the lock, or try for it each ``interval_s``, until cancelled; then give it back."""
        try:
            while True:
                self._set(await self._lock.take())
                await asyncio.sleep(self._interval_s)
        finally:
            self._set(held=False)
            await self._lock.give_back()

    def _set(self, held: bool) -> None:
        if held is self.held:
            return
        self.held = held
        text = "this controller leads the fleet of %s" if held else "it no longer leads that of %s"
        _log.info(text, self._where)
        self._changed()


async def while_leading(
    leadership: Leadership, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Run ``work`` again and again while this process leads. Raises the error that ended it."""
    while True:
        if leadership.held:
            running = asyncio.create_task(work())
            try:
                while leadership.held and not running.done():
                    await asyncio.wait({running}, timeout=_LOOK_EVERY_S)
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running
        await asyncio.sleep(_LOOK_EVERY_S)
