-- Version 3: what had expired may be asked for again.

-- How often it was. Such a delivery is sent beside those of its round, which went on without it.
ALTER TABLE deliveries ADD COLUMN revived INTEGER NOT NULL DEFAULT 0;

DROP INDEX deliveries_one_per_round;

CREATE UNIQUE INDEX deliveries_one_per_round ON deliveries (round)
    WHERE state = 'pending' AND round IS NOT NULL AND NOT revived;

CREATE INDEX deliveries_revived ON deliveries (revived) WHERE revived > 0;

PRAGMA user_version = 3;
