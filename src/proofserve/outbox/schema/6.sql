-- Version 6: receipts of chat answers, and the log of them.

CREATE TABLE log_entries (
    number          INTEGER PRIMARY KEY,
    time_ms         INTEGER NOT NULL,
    count           INTEGER NOT NULL,
    root            BLOB NOT NULL,
    previous        BLOB NOT NULL,
    signature       BLOB NOT NULL
);

-- A row without a body stays for some time: its id gets no second receipt.
CREATE TABLE receipts (
    number          INTEGER PRIMARY KEY AUTOINCREMENT,
    response_id     TEXT NOT NULL,
    choice          INTEGER NOT NULL,
    stored_at       REAL NOT NULL,
    created_ms      INTEGER NOT NULL,
    digest          BLOB NOT NULL,
    signature       BLOB NOT NULL,
    public_key      BLOB NOT NULL,
    -- Null until the receipt is in the log; then its place in the entry, and the path to the root.
    entry           INTEGER REFERENCES log_entries (number),
    place           INTEGER,
    path            BLOB,
    UNIQUE (response_id, choice),
    CHECK ((entry IS NULL) = (place IS NULL)),
    CHECK ((entry IS NULL) = (path IS NULL))
);

CREATE INDEX receipts_unlogged ON receipts (number) WHERE entry IS NULL;

CREATE INDEX receipts_by_age ON receipts (stored_at);

-- The receipt as JSON. A table of its own: a change of the row above does not rewrite it.
CREATE TABLE receipt_bodies (
    number          INTEGER PRIMARY KEY REFERENCES receipts (number),
    stored_at       REAL NOT NULL,
    body            TEXT NOT NULL
);

CREATE INDEX receipt_bodies_by_age ON receipt_bodies (stored_at);

-- Over the life of the file; one row. `posted` is the newest entry of the log in a callback.
CREATE TABLE receipt_totals (
    stored          INTEGER NOT NULL DEFAULT 0,
    deleted         INTEGER NOT NULL DEFAULT 0,
    posted          INTEGER NOT NULL DEFAULT -1
);
INSERT INTO receipt_totals DEFAULT VALUES;

CREATE TABLE answers_without_receipt (
    reason          TEXT PRIMARY KEY,
    count           INTEGER NOT NULL
) WITHOUT ROWID;

-- The table once more, because callbacks with entries of the log have another endpoint.
CREATE TABLE new_deliveries (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    round           INTEGER REFERENCES rounds (number),
    endpoint        TEXT NOT NULL CHECK (endpoint IN ('generated', 'validated', 'logged')),
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
    revived         INTEGER NOT NULL DEFAULT 0,
    delivered_at    REAL,
    UNIQUE (url, sequence),
    -- A round's delivery is a range of results, any other carries its own body.
    CHECK ((round IS NULL) = (first_seq IS NULL)),
    CHECK ((round IS NULL) = (last_seq IS NULL)),
    CHECK ((round IS NULL) = (body IS NOT NULL))
);

INSERT INTO new_deliveries
    SELECT id, round, endpoint, url, first_seq, last_seq, body, idempotency_key, sequence, attempts,
           created_at, next_attempt_at, failed_at, state, last_error, revived, delivered_at
    FROM deliveries;

DROP TABLE deliveries;

ALTER TABLE new_deliveries RENAME TO deliveries;

CREATE UNIQUE INDEX deliveries_one_per_round ON deliveries (round)
    WHERE state = 'pending' AND round IS NOT NULL AND NOT revived;

CREATE INDEX deliveries_waiting ON deliveries (url, next_attempt_at, id) WHERE state = 'pending';

CREATE INDEX deliveries_by_state ON deliveries (state);

CREATE INDEX deliveries_revived ON deliveries (revived) WHERE revived > 0;

CREATE INDEX deliveries_delivered ON deliveries (delivered_at) WHERE state = 'done';

CREATE INDEX deliveries_of_round ON deliveries (round);

CREATE INDEX deliveries_of_log ON deliveries (endpoint) WHERE state = 'pending';

PRAGMA user_version = 6;
