-- Version 5: rounds that publish the roots of their batches instead of vectors.

ALTER TABLE rounds ADD COLUMN commits_roots INTEGER NOT NULL DEFAULT 0;

-- One row for each batch of such a round; it stays until its round is deleted.
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

PRAGMA user_version = 5;
