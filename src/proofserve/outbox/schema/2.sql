-- Version 2: rounds of the distance protocol, and what of a round a restart needs.

-- Both are null in a round of the artifact protocol.
ALTER TABLE rounds ADD COLUMN r_target REAL;
ALTER TABLE rounds ADD COLUMN fraud_threshold REAL;
-- The results of the round came after this one; rounds before this version are not asked for it.
ALTER TABLE rounds ADD COLUMN after_seq INTEGER NOT NULL DEFAULT 0;

-- A round before this version was closed by every ending.
UPDATE rounds SET closed = 1;

CREATE UNIQUE INDEX rounds_open ON rounds (closed) WHERE NOT closed;

PRAGMA user_version = 2;
