-- The outbox. Times are wall-clock seconds since the epoch.

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
    -- Both are null in a round of the artifact protocol.
    r_target        REAL,
    fraud_threshold REAL,
    commits_roots   INTEGER NOT NULL DEFAULT 0,
    -- How far it got. Its results came after `after_seq`, the newest of them is `last_seq`.
    closed          INTEGER NOT NULL DEFAULT 0,
    -- Null while the round is open.
    closed_at       REAL,
    next_index      INTEGER NOT NULL DEFAULT 0,
    -- The results that are left, and how many results and failures were deleted.
    stored          INTEGER NOT NULL DEFAULT 0,
    pruned_values   INTEGER NOT NULL DEFAULT 0,
    pruned_errors   INTEGER NOT NULL DEFAULT 0,
    after_seq       INTEGER NOT NULL DEFAULT 0,
    last_seq        INTEGER NOT NULL DEFAULT 0,
    -- Results up to this seq belong to a delivery already, or were failures.
    cut_seq         INTEGER NOT NULL DEFAULT 0,
    -- The next delivery is due one interval after this: the first result, then each cut.
    interval_from   REAL
);

CREATE INDEX rounds_uncut ON rounds (number) WHERE url IS NOT NULL AND last_seq > cut_seq;

CREATE UNIQUE INDEX rounds_open ON rounds (closed) WHERE NOT closed;

CREATE TABLE results (
    seq             INTEGER PRIMARY KEY AUTOINCREMENT,
    round           INTEGER NOT NULL REFERENCES rounds (number),
    nonce           INTEGER NOT NULL,
    value           TEXT,
    error           TEXT,
    UNIQUE (round, nonce),
    CHECK ((value IS NULL) <> (error IS NULL))
);

-- One row for each batch of a round that publishes roots; it stays until its round is deleted.
CREATE TABLE batches (
    round           INTEGER NOT NULL REFERENCES rounds (number),
    -- The lane index of the batch's first nonce.
    first_index     INTEGER NOT NULL,
    count           INTEGER NOT NULL,
    root            BLOB NOT NULL,
    -- That of the batch before it; null for the first batch of the round.
    previous_root   BLOB,
    -- The seq of the batch's newest result, which decides in which delivery the root is.
    last_seq        INTEGER NOT NULL,
    PRIMARY KEY (round, first_index),
    UNIQUE (round, last_seq)
) WITHOUT ROWID;

CREATE TABLE deliveries (
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
    -- How often an operator made it due again after it had expired. Such a delivery is sent beside
    -- those of its round, which went on without it.
    revived         INTEGER NOT NULL DEFAULT 0,
    delivered_at    REAL,
    UNIQUE (url, sequence),
    -- A round's delivery is a range of results, any other carries its own body.
    CHECK ((round IS NULL) = (first_seq IS NULL)),
    CHECK ((round IS NULL) = (last_seq IS NULL)),
    CHECK ((round IS NULL) = (body IS NOT NULL))
);

-- What keeps a round's deliveries in order.
CREATE UNIQUE INDEX deliveries_one_per_round ON deliveries (round)
    WHERE state = 'pending' AND round IS NOT NULL AND NOT revived;

CREATE INDEX deliveries_waiting ON deliveries (url, next_attempt_at, id) WHERE state = 'pending';

CREATE INDEX deliveries_by_state ON deliveries (state);

CREATE INDEX deliveries_revived ON deliveries (revived) WHERE revived > 0;

CREATE INDEX deliveries_delivered ON deliveries (delivered_at) WHERE state = 'done';

CREATE INDEX deliveries_of_round ON deliveries (round);

CREATE INDEX deliveries_of_log ON deliveries (endpoint) WHERE state = 'pending';

-- The last sequence of a target among its deleted callbacks: a sequence is never used twice.
CREATE TABLE sequences (
    url             TEXT PRIMARY KEY,
    last            INTEGER NOT NULL
) WITHOUT ROWID;

-- How much was deleted from the whole file; one row.
CREATE TABLE pruned (
    results         INTEGER NOT NULL DEFAULT 0,
    callbacks       INTEGER NOT NULL DEFAULT 0,
    rounds          INTEGER NOT NULL DEFAULT 0
);
INSERT INTO pruned DEFAULT VALUES;

-- Receipts of chat answers. A row without a body stays for some time: its id gets no second one.
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

CREATE TABLE log_entries (
    number          INTEGER PRIMARY KEY,
    time_ms         INTEGER NOT NULL,
    count           INTEGER NOT NULL,
    root            BLOB NOT NULL,
    previous        BLOB NOT NULL,
    signature       BLOB NOT NULL
);

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
