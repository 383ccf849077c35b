-- Version 4: delivered results are deleted some time after their delivery.

ALTER TABLE deliveries ADD COLUMN delivered_at REAL;
-- Null while the round is open.
ALTER TABLE rounds ADD COLUMN closed_at REAL;
-- How many results and failures of the round were deleted; `stored` counts those that are left.
ALTER TABLE rounds ADD COLUMN pruned_values INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rounds ADD COLUMN pruned_errors INTEGER NOT NULL DEFAULT 0;

-- How much was deleted from the whole file; one row.
CREATE TABLE pruned (
    results         INTEGER NOT NULL DEFAULT 0,
    callbacks       INTEGER NOT NULL DEFAULT 0,
    rounds          INTEGER NOT NULL DEFAULT 0
);
INSERT INTO pruned DEFAULT VALUES;

-- The last sequence of a target among its deleted callbacks: a sequence is never used twice.
CREATE TABLE sequences (
    url             TEXT PRIMARY KEY,
    last            INTEGER NOT NULL
) WITHOUT ROWID;

-- Older versions did not store the times: ages begin with this version.
UPDATE deliveries SET delivered_at = strftime('%s', 'now') WHERE state = 'done';
UPDATE rounds SET closed_at = strftime('%s', 'now') WHERE closed;

CREATE INDEX deliveries_delivered ON deliveries (delivered_at) WHERE state = 'done';

CREATE INDEX deliveries_of_round ON deliveries (round);

PRAGMA user_version = 4;
