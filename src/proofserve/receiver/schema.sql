-- What a receiver keeps: callbacks, and what came in them.

CREATE TABLE callbacks (
    id INTEGER PRIMARY KEY, endpoint TEXT NOT NULL, idempotency_key TEXT UNIQUE, sequence INTEGER,
    received_at REAL NOT NULL, repeats INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE artifacts (
    block_hash TEXT NOT NULL, public_key TEXT NOT NULL, nonce INTEGER NOT NULL,
    vector_b64 TEXT NOT NULL,
    callback INTEGER NOT NULL REFERENCES callbacks (id),
    PRIMARY KEY (block_hash, public_key, nonce)
) WITHOUT ROWID;
CREATE TABLE winners (
    block_hash TEXT NOT NULL, public_key TEXT NOT NULL, nonce INTEGER NOT NULL,
    distance REAL NOT NULL,
    callback INTEGER NOT NULL REFERENCES callbacks (id),
    PRIMARY KEY (block_hash, public_key, nonce)
) WITHOUT ROWID;
CREATE TABLE committed_rounds (
    number INTEGER PRIMARY KEY,
    block_hash TEXT NOT NULL, public_key TEXT NOT NULL, round_id TEXT NOT NULL,
    block_height INTEGER NOT NULL,
    node_id INTEGER NOT NULL, node_count INTEGER NOT NULL,
    group_id INTEGER NOT NULL, n_groups INTEGER NOT NULL,
    scheme TEXT NOT NULL, k_dim INTEGER NOT NULL, seq_len INTEGER NOT NULL,
    UNIQUE (block_hash, public_key, round_id)
);
CREATE TABLE roots (
    round INTEGER NOT NULL REFERENCES committed_rounds (number),
    first_index INTEGER NOT NULL, count INTEGER NOT NULL,
    root BLOB NOT NULL, previous_root BLOB,
    callback INTEGER NOT NULL REFERENCES callbacks (id),
    PRIMARY KEY (round, first_index)
) WITHOUT ROWID;
-- Counted with each callback: counting millions of rows for each refresh would be too slow.
-- ``committed`` counts nonces under roots.
CREATE TABLE sources (
    public_key TEXT NOT NULL, block_hash TEXT NOT NULL,
    received INTEGER NOT NULL, artifacts INTEGER NOT NULL, winners INTEGER NOT NULL,
    committed INTEGER NOT NULL, validations INTEGER NOT NULL, frauds INTEGER NOT NULL,
    last_received REAL NOT NULL,
    PRIMARY KEY (public_key, block_hash)
) WITHOUT ROWID;
CREATE TABLE validations (
    id INTEGER PRIMARY KEY,
    callback INTEGER NOT NULL REFERENCES callbacks (id),
    request_id TEXT NOT NULL,
    public_key TEXT NOT NULL, block_hash TEXT NOT NULL, block_height INTEGER NOT NULL,
    node_id INTEGER NOT NULL,
    n_total INTEGER NOT NULL, n_mismatch INTEGER NOT NULL, mismatch_nonces TEXT NOT NULL,
    p_value REAL NOT NULL, fraud_detected INTEGER NOT NULL
);
-- The four lists are JSON, each in the order of the nonces.
CREATE TABLE distance_validations (
    id INTEGER PRIMARY KEY,
    callback INTEGER NOT NULL REFERENCES callbacks (id),
    public_key TEXT NOT NULL, block_hash TEXT NOT NULL, block_height INTEGER NOT NULL,
    nonces TEXT NOT NULL, computed_distances TEXT NOT NULL, received_distances TEXT NOT NULL,
    valid TEXT NOT NULL,
    n_invalid INTEGER, probability_honest REAL, fraud_detected INTEGER NOT NULL
);
-- Entries of public logs of receipts. ``public_key`` is in hexadecimal, ``body`` the entry and its
-- signature as JSON. ``fork`` is 1 if the file already had another entry with this key and number.
CREATE TABLE log_entries (
    public_key TEXT NOT NULL, number INTEGER NOT NULL, hash BLOB NOT NULL, body TEXT NOT NULL,
    received_at REAL NOT NULL, fork INTEGER NOT NULL,
    PRIMARY KEY (public_key, number, hash)
) WITHOUT ROWID;
CREATE INDEX log_forks ON log_entries (public_key, number) WHERE fork = 1;
