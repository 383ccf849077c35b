"""What an operator calls things in an outbox: a target by its origin, a round by its id."""

import sqlite3

import httpx


def origin_of(url: str) -> str | None:
    """Scheme, host and port of ``url``, a default port left out; None if it has none of them.

    More is not shown of a callback's address: path, query and user name can hold secrets.
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
