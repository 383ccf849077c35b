"""An outbox file for operators' commands, beside a server; they never create or rename it."""

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx

from proofserve.outbox import pruning
from proofserve.outbox.database import (
    PAUSE_S,
    connect,
    is_damage,
    named_rows,
    require_sound,
    unavailable,
    version_of,
)
from proofserve.outbox.pruning import Pruned
from proofserve.outbox.store import results_after
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.rounds.records import StoredResult
from proofserve.wire.records import artifact_record, encoding_of

# Inode, size, time of the last change, and whether a WAL exists: a process has the file open, or
# was killed while it had.
_FileState = tuple[int, int, int, bool]
# How many rounds are listed.
NEWEST_ROUNDS = 5


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection to a file, which is checked for damage first.

    Each statement sees the newest state, unless the caller begins a transaction.

    Raises OutboxUnavailable: the file belongs to another program or another version, is missing or
    damaged, cannot be read, or a server opened it meanwhile, so that the values may be
    inconsistent.
    """
    before = _state_of(path)
    *_, in_use = before
    # An ordinary connection would leave two files beside an outbox that no process has open.
    mode = "mode=ro" if in_use else "mode=ro&immutable=1"
    try:
        with closing(connect(path, mode)) as connection:
            if version_of(path, connection) == 0:
                raise OutboxUnavailable(f"the outbox {path} is empty: no server has used it yet")
            require_sound(connection)
            yield connection
    except sqlite3.Error as error:
        _require_unchanged(path, before)
        raise _failure(path, error) from error
    _require_unchanged(path, before)


@contextmanager
def writing(path: Path) -> Iterator[sqlite3.Connection]:
    """A transaction in an undamaged file, beside those of a server. Raises as ``reading``."""
    with reading(path):
        pass
    try:
        with closing(connect(path, "mode=rw")) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                yield connection
    except sqlite3.Error as error:
        raise _failure(path, error) from error


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


def _failure(path: Path, error: sqlite3.Error) -> OutboxUnavailable:
    if not is_damage(path, error):
        return unavailable(path, error)
    return OutboxUnavailable(
        f"the outbox {path} is damaged ({error}) and was not changed. The server renames it"
        f" when it starts; `sqlite3 {path} .recover` may still read it"
    )


# -- deleting --------------------------------------------------------------------------------------


def prune(path: Path, before: float) -> Pruned:
    """Delete what was delivered before ``before`` (Unix seconds), and shrink the file."""
    with reading(path) as connection:
        at_first = pruning.totals(connection)
    try:
        with closing(connect(path, "mode=rw")) as connection:
            for step in (partial(pruning.step, before=before), pruning.shrink):
                again = True
                while again:
                    connection.execute("BEGIN IMMEDIATE")
                    with connection:
                        again = step(connection)
                    # A waiting server tries again and again to lock the file; this lets it succeed.
                    time.sleep(PAUSE_S)
            return pruning.totals(connection).since(at_first)
    except sqlite3.Error as error:
        raise _failure(path, error) from error


# -- retrying --------------------------------------------------------------------------------------

_MAKE_DUE = """
    UPDATE deliveries SET state = 'pending', revived = revived + (state = 'expired'),
                          next_attempt_at = :now, attempts = 0
    WHERE state = :state AND url = coalesce(:url, url) AND (:round IS NULL OR round = :round)
"""


def retry(
    connection: sqlite3.Connection,
    now: float,
    origin: str | None = None,
    round_id: str | None = None,
    expired: bool = False,
) -> tuple[int, int]:
    """Make callbacks due at ``now``, and reset their counts of failures.

    Those to the target ``origin`` and of the round; None for all. ``expired``: also expired ones.
    Returns how many pending and how many expired callbacks are due now. Key, sequence and body do
    not change. Raises ValueError for an unknown round or target.
    """
    number = None if round_id is None else round_number(connection, round_id)
    urls: list[str | None] = [None]
    if origin is not None:
        known = [url for (url,) in connection.execute("SELECT DISTINCT url FROM deliveries")]
        urls = [url for url in known if origin_of(url) == origin]
        if not urls:
            origins = ", ".join(sorted({str(origin_of(url)) for url in known})) or "none"
            raise ValueError(f"no callback goes to {origin}; targets of the outbox: {origins}")

    def make_due(state: str) -> int:
        each = [{"url": url, "round": number, "now": now, "state": state} for url in urls]
        return connection.executemany(_MAKE_DUE, each).rowcount

    # First the pending ones: otherwise the expired ones would be counted as pending, too.
    return make_due("pending"), make_due("expired") if expired else 0


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


# -- counting --------------------------------------------------------------------------------------

# Only the origin of a callback URL and the kind of an error are shown: the rest can be secret.
# ``origin`` is our own function; times are null where nothing is pending.
_COUNTS = """
    SELECT origin(url) AS origin, sum(state = 'pending') AS pending,
           sum(state = 'pending' AND attempts > 0) AS failing, sum(state = 'done') AS delivered,
           sum(state = 'expired') AS expired, sum(revived) AS revived,
           max(0.0, :now - min(CASE state WHEN 'pending' THEN created_at END)) AS oldest_pending_s,
           max(0.0, min(CASE state WHEN 'pending' THEN next_attempt_at END) - :now)
               AS next_attempt_s
    FROM deliveries GROUP BY origin ORDER BY min(url)
"""
# Beside an aggregate that is a maximum, SQLite takes other columns from the row that has it.
_ERRORS = """
    SELECT origin(url) AS origin, last_error, max(failed_at) FROM deliveries
    WHERE state IN ('pending', 'expired') AND failed_at IS NOT NULL GROUP BY origin
"""
_ROUNDS = """
    SELECT round_id, json_extract(scheme, '$.name') AS scheme, block_hash, NOT closed AS open,
           stored AS results
    FROM rounds ORDER BY number DESC LIMIT :limit
"""
_TOTALS = """
    SELECT (SELECT user_version FROM pragma_user_version) AS schema_version,
           (SELECT page_count * page_size FROM pragma_page_count, pragma_page_size) AS bytes,
           (SELECT count(*) FROM rounds) AS rounds,
           (SELECT count(*) FROM rounds WHERE url IS NOT NULL AND last_seq > cut_seq)
               AS uncut_rounds,
           (SELECT coalesce(sum(stored), 0) FROM rounds) AS results,
           (SELECT results FROM pruned) AS deleted_results,
           (SELECT stored - deleted FROM receipt_totals) AS receipts,
           (SELECT count(*) FROM log_entries) AS log_entries
"""


def read_statistics(connection: sqlite3.Connection, now: float) -> dict[str, Any]:
    """The numbers of the whole file, without what is already deleted, as JSON values.

    ``uncut_rounds`` have results that are in no callback yet; ``deleted_results`` were delivered.
    ``receipts`` are those kept, ``log_entries`` those of their log.

    ``targets`` has the callbacks of each origin: ``pending`` are not delivered yet; ``failing`` of
    these have failed since they were queued or retried by the operator. ``delivered`` are those
    that are not deleted yet. ``expired`` had too many failures; ``revived`` counts expired ones
    that the operator made due again. ``oldest_pending_s`` is an age and ``next_attempt_s`` a wait,
    None where nothing is pending. ``last_error`` is the kind of the newest failure among
    undelivered callbacks.

    ``newest_rounds`` has the ``results`` that each keeps, failures among them.
    """
    connection.create_function("origin", 1, cache(lambda url: origin_of(url) or "not an address"))
    # ``HTTP 503``, ``ConnectError``, ...; the text after it may come from the target.
    errors = {to: error.partition(":")[0] for to, error, _ in connection.execute(_ERRORS)}
    (totals,) = named_rows(connection, _TOTALS, {})
    counts = named_rows(connection, _COUNTS, {"now": now})
    rounds = named_rows(connection, _ROUNDS, {"limit": NEWEST_ROUNDS})
    return {
        **totals,
        "targets": [{**row, "last_error": errors.get(row["origin"])} for row in counts],
        "newest_rounds": [{**row, "open": bool(row["open"])} for row in rounds],
    }


# -- exporting -------------------------------------------------------------------------------------

# Rows that are in memory at a time.
_PAGE = 4096
_FIND = "SELECT * FROM rounds WHERE number = :number"


def rows(
    connection: sqlite3.Connection, after: int = 0, round_id: str | None = None
) -> Iterator[StoredResult]:
    """Results with ``seq > after`` in order. Raises ValueError for an unknown round."""
    number = None if round_id is None else round_number(connection, round_id)
    while page := results_after(connection, after, _PAGE, number):
        yield from page
        after = page[-1].seq


def document(connection: sqlite3.Connection, round_id: str, after: int = 0) -> Iterator[str]:
    """The results of an artifact round, as pieces of the JSON that ``proofserve verify`` reads.

    Its ``nonces`` are those of all rows of the round; a nonce that failed has no artifact. It names
    its lane, unless results are deleted: between the others they would seem left out.
    Raises ValueError for an unknown round, and for one of the distance protocol.
    """
    number = round_number(connection, round_id)
    (found,) = named_rows(connection, _FIND, {"number": number})
    if found["r_target"] is not None:
        raise ValueError(
            f"round {round_id!r} is of the distance protocol: POST /validate judges its winners"
        )
    names = ["block_hash", "block_height", "public_key"]
    if not found["pruned_values"] + found["pruned_errors"]:
        names += ["node_id", "node_count", "group_id", "n_groups"]
    head = {
        **{name: found[name] for name in names},
        "params": {"seq_len": found["seq_len"]},
        "scheme": json.loads(found["scheme"])["name"],
        "encoding": encoding_of(found["width"]),
    }

    def known() -> Iterator[StoredResult]:
        # Both lists cover the same rows: results that are stored meanwhile are in neither list.
        return takewhile(
            lambda row: row.seq <= found["last_seq"], rows(connection, after, round_id)
        )

    yield f'{json.dumps(head)[:-1]}, "nonces": ['
    yield from _comma_separated(str(row.nonce) for row in known())
    yield '], "artifacts": ['
    yield from _comma_separated(
        json.dumps(artifact_record(row.nonce, row.value))
        for row in known()
        if row.value is not None
    )
    yield "]}\n"


def _comma_separated(items: Iterable[str]) -> Iterator[str]:
    between = ""
    for item in items:
        yield f"{between}{item}"
        between = ","
