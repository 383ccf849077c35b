"""Which of several controllers reconciles: one lock in the database, or beside its file."""

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Protocol

import psycopg
from sqlalchemy import URL

from proofserve.fleet.sql import address

_log = logging.getLogger(__name__)

# The longest wait for PostgreSQL in seconds: without an answer the lock counts as lost.
_ANSWER_S = 3.0
# An advisory lock of PostgreSQL, which lives as long as its connection.
_LEADING = 0x70726F6F66_02
# The server ends the connection of a machine that is gone, after some seconds, so that another
# controller gets the lock.
_SESSION = (
    "SET tcp_keepalives_idle = 2; SET tcp_keepalives_interval = 1; SET tcp_keepalives_count = 3;"
    " SET statement_timeout = '3s'"
)


class _Lock(Protocol):
    async def take(self) -> bool:
        """Whether this process has the lock: taken before and not lost, or taken now."""
        ...

    async def give_back(self) -> None: ...


class Leadership:
    """Tries for the lock while ``run`` runs. Made by ``Leadership(url)``, as ``FleetStore.open``.

    PostgreSQL: an advisory lock on a connection of its own. SQLite: a lock on ``<file>.leader``.
    ``changed`` is called in the event loop after each change of ``held``. Raises ValueError for a
    URL of another kind.
    """

    def __init__(
        self, url: str, interval_s: float = 1.0, changed: Callable[[], None] = lambda: None
    ) -> None:
        parsed = address.parse(url)
        self._where = address.shown(parsed)
        self._lock: _Lock
        if address.is_sqlite(parsed):
            file = address.file_of(parsed)
            self._lock = _FileLock(file.with_name(f"{file.name}.leader"))
        else:
            self._lock = _AdvisoryLock(parsed)
        self._interval_s = interval_s
        self._changed = changed
        self._held = False

    @property
    def held(self) -> bool:
        """Whether this process leads, as far as it knows: a lost lock is noticed within 4 s."""
        return self._held

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
        if held is self._held:
            return
        self._held = held
        text = "this controller leads the fleet of %s" if held else "it no longer leads that of %s"
        _log.info(text, self._where)
        self._changed()


class _AdvisoryLock:
    def __init__(self, url: URL) -> None:
        self._conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._connection: psycopg.AsyncConnection[tuple[bool]] | None = None

    async def take(self) -> bool:
        try:
            async with asyncio.timeout(_ANSWER_S):
                if self._connection is not None:
                    # While the connection lives, so does the lock.
                    await self._connection.execute("SELECT 1")
                    return True
                return await self._try()
        except (psycopg.Error, OSError, TimeoutError) as error:
            _log.warning("the lock of the fleet cannot be had: %s", _first_line(error))
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
            cursor = await connection.execute("SELECT pg_try_advisory_lock(%s)", (_LEADING,))
            row = await cursor.fetchone()
            if row is not None and row[0]:
                self._connection = connection
                return True
        finally:
            if self._connection is not connection:
                await connection.close()
        return False


class _FileLock:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    async def take(self) -> bool:
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
            _log.warning("the lock of the fleet cannot be had: %s", error)
            return False
        return self._is_ours(self._file)

    async def give_back(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _is_ours(self, file: BinaryIO) -> bool:
        """Whether the file was not deleted: another process would lock the next one."""
        try:
            there, ours = self._path.stat(), os.fstat(file.fileno())
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
