"""One database behind a few threads, so that the event loop never waits for it."""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    create_engine,
    event,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from proofserve.fleet.records import StoreUnavailable
from proofserve.fleet.sql.tables import batches, counters, desired, metadata, versions

_POSTGRESQL = frozenset({"postgresql", "postgres", "postgresql+psycopg"})
_HOW = "give postgresql://user@host/name, sqlite:///file, or the path of a file"
P = ParamSpec("P")
T = TypeVar("T")

# Connections of one store to PostgreSQL, and as many threads.
_CONNECTIONS = 4
# The longest wait for PostgreSQL's answer, in seconds: a server that is stopped in mid-answer, or
# unplugged, would otherwise hold a thread for ever.
_ANSWER_S = 20.0
_CONNECT_S = 5
# What one statement may take on the server, and wait for a row that another transaction locks.
_SESSION = (
    "SET statement_timeout = '15s'; SET lock_timeout = '10s';"
    " SET idle_in_transaction_session_timeout = '15s'"
)
# A second process with the same SQLite file writes for some milliseconds at a time. Seconds.
_SQLITE_LOCK_S = 5.0
_SQLITE_WRITE = "BEGIN IMMEDIATE"
# The execution option that holds the statement with which a transaction of SQLite begins.
_BEGIN = "fleet_begin"
_LOG_AGAIN_S = 0.02
# An advisory lock of PostgreSQL: several controllers may start at the same time.
_MIGRATING = 0x70726F6F66_01
# Of the tables, as the database notes it.
_VERSION = "1"


class FleetDatabase:
    """Runs transactions: on SQLite one after another, on PostgreSQL a few at a time."""

    def __init__(self, url: URL, answer_s: float = _ANSWER_S) -> None:
        self._name = shown(url)
        self._is_sqlite = is_sqlite(url)
        self._answer_s = None if self._is_sqlite else answer_s
        self._engine = _sqlite(url) if self._is_sqlite else _postgresql(url)
        workers = 1 if self._is_sqlite else _CONNECTIONS
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="fleet-store")
        self._running: set[asyncio.Future[Any]] = set()
        self._closed = False

    @classmethod
    async def open(cls, url: URL, answer_s: float = _ANSWER_S) -> Self:
        """Connect, and ``migrate``. Raises StoreUnavailable."""
        database = cls(url, answer_s)
        try:
            await database.write(migrate)
        except BaseException:
            await database.close()
            raise
        return database

    async def read(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kw: P.kwargs
    ) -> T:
        """Run ``work`` on one snapshot and return its result. Raises StoreUnavailable."""
        options = {} if self._is_sqlite else {"isolation_level": "REPEATABLE READ"}
        return await self._run(options, lambda c: work(c, *args, **kw))

    async def write(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kw: P.kwargs
    ) -> T:
        """Run ``work`` in a transaction: then all its changes are on disk, or none of them.

        Raises StoreUnavailable, and the errors of ``work``.
        """
        options = {_BEGIN: _SQLITE_WRITE} if self._is_sqlite else {}
        return await self._run(options, lambda c: work(c, *args, **kw))

    async def close(self) -> None:
        """Finish queued transactions and disconnect. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._running:
            await asyncio.wait(self._running, timeout=self._answer_s)
        # Without a wait: a thread may still wait for a server that does not answer.
        self._threads.shutdown(wait=False)
        await asyncio.to_thread(self._engine.dispose)

    async def _run(self, options: dict[str, Any], work: Callable[[Connection], T]) -> T:
        if self._closed:
            raise StoreUnavailable(f"the fleet's database {self._name} is closed")
        running = asyncio.get_running_loop().run_in_executor(
            self._threads, self._transact, options, work
        )
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        try:
            async with asyncio.timeout(self._answer_s):
                return await running
        except TimeoutError:
            text = f"the fleet's database {self._name} did not answer in {self._answer_s:g} s"
            raise StoreUnavailable(text) from None

    def _transact(self, options: dict[str, Any], work: Callable[[Connection], T]) -> T:
        try:
            with self._engine.connect() as connection:
                connection.execution_options(**options)
                try:
                    with connection.begin():
                        return work(connection)
                finally:
                    # A pool that was disposed of closes no connection that comes back.
                    if self._closed and not connection.invalidated:
                        connection.detach()
        except SQLAlchemyError as error:
            raise StoreUnavailable(
                f"the fleet's database {self._name} failed: {why(error)}"
            ) from error


def database_url(text: str) -> URL:
    """The URL of a database for SQLAlchemy. Raises ValueError for what is not one.

    A text without a scheme is the path of an SQLite file.
    """
    if "://" not in text:
        if not text:
            raise ValueError(f"the database is empty: {_HOW}")
        return URL.create("sqlite", database=str(Path(text).absolute()))
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # Without the text: it may hold a password.
        raise ValueError(f"the database is not a URL: {_HOW}") from None
    if url.drivername in _POSTGRESQL:
        return url.set(drivername="postgresql+psycopg")
    if url.drivername == "sqlite" and url.database and url.database != ":memory:":
        return url.set(database=str(Path(url.database).absolute()), query={})
    raise ValueError(f"the database {shown(url)} is of another kind: {_HOW}")


def is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def shown(url: URL) -> str:
    """The URL for an error or a log line, without password and options."""
    return url.set(query={}).render_as_string(hide_password=True)


def why(error: SQLAlchemyError) -> str:
    """The driver's own words: without the statement and its values, which may be large."""
    inner = error.orig if isinstance(error, DBAPIError) else error
    lines = str(inner).strip().splitlines() or [type(inner).__name__]
    return "; ".join(line.strip() for line in lines[:2])


def _postgresql(url: URL) -> Engine:
    engine = create_engine(
        url,
        pool_size=_CONNECTIONS,
        max_overflow=0,
        # A connection from before a restart of the server is replaced, not an error.
        pool_pre_ping=True,
        hide_parameters=True,
        connect_args={
            "connect_timeout": _CONNECT_S,
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": 10_000,
        },
    )

    @event.listens_for(engine, "connect")
    def _limit(connection: Any, _record: object) -> None:
        connection.execute(_SESSION)
        connection.commit()

    return engine


def _sqlite(url: URL) -> Engine:
    engine = create_engine(
        url,
        pool_size=1,
        max_overflow=0,
        hide_parameters=True,
        # Only the one thread uses the connection, but another one closes it.
        connect_args={"timeout": _SQLITE_LOCK_S, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: object) -> None:
        # We begin transactions ourselves: Python would begin them too late for reads.
        connection.isolation_level = None
        use_log(connection, _SQLITE_LOCK_S)
        # WAL alone may lose the last commits in a power failure; results must be on disk to count.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))

    return engine


def use_log(connection: sqlite3.Connection, longest_s: float) -> None:
    """Switch an SQLite file to the write-ahead log; it keeps that. Raises sqlite3.Error.

    SQLite refuses this at once while another process writes without the log, or switches too. It is
    tried for ``longest_s`` seconds.
    """
    deadline = time.monotonic() + longest_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        else:
            return
        time.sleep(_LOG_AGAIN_S)


def migrate(connection: Connection) -> None:
    """Bring the tables to the present version, in the caller's transaction.

    Raises StoreUnavailable for tables of a newer proofserve and for a file of another program.
    """
    is_file = connection.dialect.name == "sqlite"
    if not is_file:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATING})
    found = version_of(connection)
    # Other parts of proofserve number the versions of their files in this place.
    if is_file and not found and connection.execute(text("PRAGMA user_version")).scalar_one():
        raise StoreUnavailable(
            "the file is a database of another program, an outbox for example: name another file"
        )
    if found is None:
        _create_tables(connection)
    elif found != _VERSION:
        raise StoreUnavailable(
            f"the fleet's database has version {found}, this proofserve knows up to {_VERSION}:"
            " use the newer proofserve or another database"
        )


def version_of(connection: Connection) -> str | None:
    """The version of the tables; None for a database without them."""
    if not inspect(connection).has_table(versions.name):
        return None
    return connection.execute(select(versions.c.version_num)).scalar()


def _create_tables(connection: Connection) -> None:
    """All tables as ``sql.tables`` has them: nothing was released with earlier ones.

    Once this version is released it must stay as it is: before the tables change again, write
    them out here, and let ``migrate`` lead from here to the next version.
    """
    versions.create(connection)
    connection.execute(versions.insert().values(version_num=_VERSION))
    metadata.create_all(connection, checkfirst=False)
    connection.execute(desired.insert().values(id=1, state="IDLE"))
    connection.execute(counters.insert().values(id=1, last_batch=0, last_seq=0))
    if connection.dialect.name == "postgresql":
        # Vectors do not compress: trying it would take most of the time of an insert. And of a
        # value stored like this a part is read without the rest.
        for column in ("nonces", "found"):
            storage = f"ALTER COLUMN {column} SET STORAGE EXTERNAL"
            connection.execute(text(f"ALTER TABLE {batches.name} {storage}"))
