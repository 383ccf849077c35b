-- Version 1 of the outbox. Times are wall-clock seconds since the epoch.

CREATE TABLE rounds (
    number          INTEGER PRIMARY KEY,
    round_id        TEXT NOT NULL UNIQUE,
    -- The order as it was given. Opening a round again compares all of it.
    scheme          TEXT NOT NULL,
    width           INTEGER NOT NULL,
    block_hash      TEXT NOT NULL,
    public_key      TEXT NOT NULL,
    seq_len         INTEGER NOT NULL,
    block_height    INTEGER NOT NULL,
    node_id         INTEGER NOT NULL,
    node_count      INTEGER NOT NULL,
    group_id        INTEGER NOT NULL,
    n_groups        INTEGER NOT NULL,
    batch_size      INTEGER NOT NULL,
    url             TEXT,
    -- How far it got.
    closed          INTEGER NOT NULL DEFAULT 0,
    next_index      INTEGER NOT NULL DEFAULT 0,
    stored          INTEGER NOT NULL DEFAULT 0,
    last_seq        INTEGER NOT NULL DEFAULT 0,
    -- Results up to this seq belong to a delivery already, or were failures.
    cut_seq         INTEGER NOT NULL DEFAULT 0,
    -- The next delivery is due one interval after this: the first result, then each cut.
    interval_from   REAL
);

CREATE INDEX rounds_uncut ON rounds (number) WHERE url IS NOT NULL AND last_seq > cut_seq;

CREATE TABLE results (
    seq             INTEGER PRIMARY KEY AUTOINCREMENT,
    round           INTEGER NOT NULL REFERENCES rounds (number),
    nonce           INTEGER NOT NULL,
    value           TEXT,
    error           TEXT,
    UNIQUE (round, nonce),
    CHECK ((value IS NULL) <> (error IS NULL))
);

CREATE TABLE deliveries (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    round           INTEGER REFERENCES rounds (number),
    endpoint        TEXT NOT NULL CHECK (endpoint IN ('generated', 'validated')),
    url             TEXT NOT NULL,
    first_seq       INTEGER,
    last_seq        INTEGER,
    body            TEXT,
    idempotency_key TEXT NOT NULL UNIQUE,
    sequence        INTEGER NOT NULL,
    attempts        INTEGER NOT NULL DEFAULT 0,
    created_at      REAL NOT NULL,
    next_attempt_at REAL NOT NULL,
    failed_at       REAL,
    state           TEXT NOT NULL DEFAULT 'pending'
                    CHECK (state IN ('pending', 'done', 'expired')),
    last_error      TEXT,
    UNIQUE (url, sequence),
    -- A round's delivery is a range of results, any other carries its own body.
    CHECK ((round IS NULL) = (first_seq IS NULL)),
    CHECK ((round IS NULL) = (last_seq IS NULL)),
    CHECK ((round IS NULL) = (body IS NOT NULL))
);

-- What keeps a round's deliveries in order.
CREATE UNIQUE INDEX deliveries_one_per_round ON deliveries (round)
    WHERE state = 'pending' AND round IS NOT NULL;

CREATE INDEX deliveries_waiting ON deliveries (url, next_attempt_at, id) WHERE state = 'pending';

CREATE INDEX deliveries_by_state ON deliveries (state);

PRAGMA user_version = 1;
