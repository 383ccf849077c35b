"""Makes callbacks due at once, for an operator. Runs inside a transaction of the caller."""

import sqlite3
from dataclasses import dataclass

import httpx

_MAKE_DUE = """
    UPDATE deliveries SET state = 'pending', revived = revived + (state = 'expired'),
                          next_attempt_at = :now, attempts = 0
    WHERE state = :state AND url = coalesce(:url, url) AND (:round IS NULL OR round = :round)
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """Selects callbacks by target (an origin) and by round; None selects all.

    ``expired`` also selects expired callbacks.
    """

    origin: str | None = None
    round_id: str | None = None
    expired: bool = False


@dataclass(frozen=True, slots=True)
class Retried:
    pending: int
    revived: int


def retry(connection: sqlite3.Connection, choice: Choice, now: float) -> Retried:
    """Make callbacks due at ``now``, and reset their counts of failures.

    Key, sequence and body do not change. Raises ValueError for an unknown round or target.
    """
    number = None if choice.round_id is None else round_number(connection, choice.round_id)
    urls = [None] if choice.origin is None else _urls(connection, choice.origin)

    def make_due(state: str) -> int:
        each = [{"url": url, "round": number, "now": now, "state": state} for url in urls]
        return connection.executemany(_MAKE_DUE, each).rowcount

    # First the pending ones: otherwise the expired ones would be counted as pending, too.
    return Retried(make_due("pending"), make_due("expired") if choice.expired else 0)


def origin_of(url: str) -> str | None:
    """Scheme, host and port (if not the default) of ``url``; None without scheme or host.

    The rest of a callback URL is not shown, because path, query and user name can hold secrets.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return None
    if not (parsed.scheme and parsed.host):
        return None
    bare = parsed.copy_with(userinfo=b"", path="/", query=None, fragment=None)
    return str(bare).rstrip("/")


def round_number(connection: sqlite3.Connection, round_id: str) -> int:
    """The row of a round. Raises ValueError for one that the outbox does not have."""
    found = connection.execute("SELECT number FROM rounds WHERE round_id = ?", (round_id,))
    for (number,) in found:
        return int(number)
    raise ValueError(
        f"there is no round {round_id!r} in the outbox: `proofserve outbox status` lists the newest"
    )


def _urls(connection: sqlite3.Connection, origin: str) -> list[str]:
    known = [url for (url,) in connection.execute("SELECT DISTINCT url FROM deliveries")]
    urls = [url for url in known if origin_of(url) == origin]
    if not urls:
        origins = ", ".join(sorted({str(origin_of(url)) for url in known})) or "none"
        raise ValueError(f"no callback goes to {origin}; targets of the outbox: {origins}")
    return urls
