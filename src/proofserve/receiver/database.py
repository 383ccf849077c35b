"""The receiver's SQLite file: its tables and its connections."""

import sqlite3
from pathlib import Path

_VERSION_1 = """
CREATE TABLE callbacks (
    id              INTEGER PRIMARY KEY,
    endpoint        TEXT NOT NULL,
    idempotency_key TEXT UNIQUE,
    sequence        INTEGER,
    received_at     REAL NOT NULL,
    repeats         INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE artifacts (
    block_hash      TEXT NOT NULL,
    public_key      TEXT NOT NULL,
    nonce           INTEGER NOT NULL,
    vector_b64      TEXT NOT NULL,
    callback        INTEGER NOT NULL REFERENCES callbacks (id),
    PRIMARY KEY (block_hash, public_key, nonce)
) WITHOUT ROWID;
-- Counted with each callback: counting millions of rows for each refresh would be too slow.
CREATE TABLE sources (
    public_key      TEXT NOT NULL,
    block_hash      TEXT NOT NULL,
    received        INTEGER NOT NULL DEFAULT 0,
    stored          INTEGER NOT NULL DEFAULT 0,
    validations     INTEGER NOT NULL DEFAULT 0,
    frauds          INTEGER NOT NULL DEFAULT 0,
    last_received   REAL NOT NULL,
    PRIMARY KEY (public_key, block_hash)
) WITHOUT ROWID;
CREATE TABLE validations (
    id              INTEGER PRIMARY KEY,
    callback        INTEGER NOT NULL REFERENCES callbacks (id),
    request_id      TEXT NOT NULL,
    public_key      TEXT NOT NULL,
    block_hash      TEXT NOT NULL,
    block_height    INTEGER NOT NULL,
    node_id         INTEGER NOT NULL,
    n_total         INTEGER NOT NULL,
    n_mismatch      INTEGER NOT NULL,
    mismatch_nonces TEXT NOT NULL,
    p_value         REAL NOT NULL,
    fraud_detected  INTEGER NOT NULL
);
PRAGMA user_version = 1;
"""

# Adds the distance protocol: the counts of a source now cover both protocols.
_VERSION_2 = """
CREATE TABLE winners (
    block_hash      TEXT NOT NULL,
    public_key      TEXT NOT NULL,
    nonce           INTEGER NOT NULL,
    distance        REAL NOT NULL,
    callback        INTEGER NOT NULL REFERENCES callbacks (id),
    PRIMARY KEY (block_hash, public_key, nonce)
) WITHOUT ROWID;
-- The four lists are JSON, each in the order of the nonces.
CREATE TABLE distance_validations (
    id                 INTEGER PRIMARY KEY,
    callback           INTEGER NOT NULL REFERENCES callbacks (id),
    public_key         TEXT NOT NULL,
    block_hash         TEXT NOT NULL,
    block_height       INTEGER NOT NULL,
    nonces             TEXT NOT NULL,
    computed_distances TEXT NOT NULL,
    received_distances TEXT NOT NULL,
    valid              TEXT NOT NULL,
    n_invalid          INTEGER,
    probability_honest REAL,
    fraud_detected     INTEGER NOT NULL
);
ALTER TABLE sources RENAME COLUMN stored TO artifacts;
ALTER TABLE sources ADD COLUMN winners INTEGER NOT NULL DEFAULT 0;
PRAGMA user_version = 2;
"""

# Adds the roots of rounds that publish these instead of vectors.
_VERSION_3 = """
CREATE TABLE committed_rounds (
    number          INTEGER PRIMARY KEY,
    block_hash      TEXT NOT NULL,
    public_key      TEXT NOT NULL,
    round_id        TEXT NOT NULL,
    block_height    INTEGER NOT NULL,
    node_id         INTEGER NOT NULL,
    node_count      INTEGER NOT NULL,
    group_id        INTEGER NOT NULL,
    n_groups        INTEGER NOT NULL,
    scheme          TEXT NOT NULL,
    k_dim           INTEGER NOT NULL,
    seq_len         INTEGER NOT NULL,
    UNIQUE (block_hash, public_key, round_id)
);
CREATE TABLE roots (
    round           INTEGER NOT NULL REFERENCES committed_rounds (number),
    first_index     INTEGER NOT NULL,
    count           INTEGER NOT NULL,
    root            BLOB NOT NULL,
    previous_root   BLOB,
    callback        INTEGER NOT NULL REFERENCES callbacks (id),
    PRIMARY KEY (round, first_index)
) WITHOUT ROWID;
-- Nonces under roots.
ALTER TABLE sources ADD COLUMN committed INTEGER NOT NULL DEFAULT 0;
PRAGMA user_version = 3;
"""

# Adds entries of public logs of receipts.
_VERSION_4 = """
-- ``public_key`` is in hexadecimal, ``body`` the entry and its signature as JSON. ``fork`` is 1 if
-- the file already had another entry with this key and number.
CREATE TABLE log_entries (
    public_key      TEXT NOT NULL,
    number          INTEGER NOT NULL,
    hash            BLOB NOT NULL,
    body            TEXT NOT NULL,
    received_at     REAL NOT NULL,
    fork            INTEGER NOT NULL,
    PRIMARY KEY (public_key, number, hash)
) WITHOUT ROWID;
CREATE INDEX log_forks ON log_entries (public_key, number) WHERE fork = 1;
PRAGMA user_version = 4;
"""

# One script for each version, so that a file of any older version can be migrated.
_STEPS = (_VERSION_1, _VERSION_2, _VERSION_3, _VERSION_4)


class ReceiverFileError(Exception):
    """The file cannot be opened, or belongs to another program or to a newer version."""


def connect(path: Path) -> sqlite3.Connection:
    """A connection for several threads, one at a time. Raises ReceiverFileError."""
    try:
        # We begin transactions ourselves: Python would begin them too late for reads.
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise ReceiverFileError(f"cannot open {path}: {error}") from error
    try:
        _prepare(connection)
    except (sqlite3.Error, ReceiverFileError) as error:
        connection.close()
        raise ReceiverFileError(f"cannot use {path}: {error}") from error
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version > len(_STEPS):
        raise ReceiverFileError(
            f"it has version {version}, this proofserve reads up to {len(_STEPS)}"
        )
    if version == 0 and tables:
        raise ReceiverFileError("it is a database of another program")
    connection.execute("PRAGMA journal_mode = WAL")
    # The sender never repeats a callback after a 200, so the callback must be on disk by then.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    for script in _STEPS[version:]:
        connection.executescript(f"BEGIN IMMEDIATE;\n{script}\nCOMMIT;")
