"""Where the fleet's database is: PostgreSQL by URL, or an SQLite file."""

from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

_POSTGRESQL = frozenset({"postgresql", "postgres", "postgresql+psycopg"})
_HOW = "give postgresql://user@host/name, sqlite:///file, or the path of a file"


def parse(text: str) -> URL:
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


def file_of(url: URL) -> Path:
    """The file of an SQLite database."""
    return Path(url.database or "")


def shown(url: URL) -> str:
    """The URL for an error or a log line, without password and options."""
    return url.set(query={}).render_as_string(hide_password=True)
