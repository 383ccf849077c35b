"""A file of version 1, as the proofserve before the distance protocol left it."""

import json
import sqlite3
from contextlib import closing
from importlib import resources
from pathlib import Path

import pytest

from proofserve.outbox.schedule import CallbackPolicy
from proofserve.outbox.store import SqliteOutbox
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.rounds.records import RoundProgress, StoredResult

from .support import a_distance_spec, a_spec, nonces_of, winners

pytestmark = pytest.mark.anyio

URL = "http://a"

# Round r1 is as a crash leaves it: open, one delivery waiting, one result uncut.
_ROWS = """
    INSERT INTO rounds (number, round_id, scheme, width, block_hash, public_key, seq_len,
                        block_height, node_id, node_count, group_id, n_groups, batch_size, url,
                        closed, next_index, stored, last_seq, cut_seq, interval_from)
    VALUES (1, 'r0', :scheme, 12, 'b10c', 'k3y', 256, 77, 3, 4, 0, 1, 32, NULL,
            1, 1, 1, 1, 0, 1e9),
           (2, 'r1', :scheme, 12, 'b10c', 'k3y', 256, 77, 3, 4, 0, 1, 32, 'http://a',
            0, 3, 3, 4, 3, 1e9);
    INSERT INTO results (round, nonce, value, error)
    VALUES (1, 3, 'vector3', NULL), (2, 3, 'vector3', NULL), (2, 7, NULL, 'not finite'),
           (2, 11, 'vector11', NULL);
    INSERT INTO deliveries (round, endpoint, url, first_seq, last_seq, body, idempotency_key,
                            sequence, attempts, created_at, next_attempt_at, state)
    VALUES (NULL, 'validated', 'http://a', NULL, NULL, '{}', 'k1', 1, 1, 1e9, 1e9, 'done'),
           (2, 'generated', 'http://a', 2, 3, NULL, 'k2', 2, 4, 1e9, 1e9, 'pending');
"""


@pytest.fixture
def old(path: Path) -> Path:
    scheme = json.dumps(a_spec().work.scheme.to_wire(), sort_keys=True)
    with closing(sqlite3.connect(path)) as file:
        file.executescript(
            resources.files("proofserve.outbox").joinpath("schema/1.sql").read_text("utf-8")
        )
        file.executescript(_ROWS.replace(":scheme", f"'{scheme}'"))
    return path


async def test_a_migration_keeps_rows_and_progress_and_closes_rounds(old: Path) -> None:
    async with await SqliteOutbox.open(old) as store:
        assert await store.results(0, 10) == [
            StoredResult(1, "r0", 3, "vector3"),
            StoredResult(2, "r1", 3, "vector3"),
            StoredResult(3, "r1", 7, error="not finite"),
            StoredResult(4, "r1", 11, "vector11"),
        ]
        assert await store.interrupted() is None
        assert await store.progress("r0") == RoundProgress(1, found=1)
        assert await store.open_round(a_spec("r1", URL)) == RoundProgress(3, found=2, failed=1)
        assert await store.interrupted() == a_spec("r1", URL)
    with closing(sqlite3.connect(old)) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (6,)


async def test_after_a_migration_deliveries_continue_and_uncut_results_are_due(old: Path) -> None:
    async with await SqliteOutbox.open(old) as store:
        waiting = await _due(store)
        assert waiting == ("k2", 2, 4, [3])
        key, sequence, _, nonces = await _due(store)
        assert (sequence, nonces) == (3, [11])
        assert key not in ("k1", "k2")
        gauges = await store.gauges()
        assert (gauges.results, gauges.pending, gauges.delivered) == (4, 0, 3)


async def _due(store: SqliteOutbox) -> tuple[str, int, int, list[int]]:
    """Acknowledge the one delivery that is due, and return it."""
    (one,) = (await store.plan(CallbackPolicy())).due
    nonces = nonces_of(json.loads(await store.body(one)))
    await store.acknowledge(one)
    return one.key, one.sequence, one.attempts, nonces


async def test_a_migrated_file_stores_distance_rounds(old: Path) -> None:
    async with await SqliteOutbox.open(old) as store:
        await store.open_round(a_distance_spec(url="http://b"))
        await store.record("d1", 32, winners(3, 7), {})
        assert await store.winners("d1", 10) == winners(3, 7)
        assert await store.winners("r1", 10) == []
    async with await SqliteOutbox.open(old) as store:
        assert await store.interrupted() == a_distance_spec(url="http://b")
        assert [row.seq for row in await store.results(4, 10)] == [5, 6]


async def test_a_migration_that_fails_leaves_the_old_version(old: Path) -> None:
    with closing(sqlite3.connect(old)) as file:
        # The second statement of the script fails because of this.
        file.execute("ALTER TABLE rounds ADD COLUMN fraud_threshold REAL")
    with pytest.raises(OutboxUnavailable, match="duplicate column name: fraud_threshold"):
        await SqliteOutbox.open(old)
    with closing(sqlite3.connect(old)) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (1,)
        columns = [row[1] for row in file.execute("PRAGMA table_info(rounds)")]
        assert "r_target" not in columns


async def test_a_migration_keeps_callbacks_of_every_state_and_their_numbers(old: Path) -> None:
    with closing(sqlite3.connect(old)) as file:
        names = [row[1] for row in file.execute("PRAGMA table_info(deliveries)")]
        query = f"SELECT {', '.join(names)} FROM deliveries ORDER BY id"  # noqa: S608
        before = file.execute(query).fetchall()
    async with await SqliteOutbox.open(old) as store:
        await store.enqueue("logged", URL, {"entries": []})
    with closing(sqlite3.connect(old)) as file:
        assert file.execute(query).fetchall()[:-1] == before
        added = file.execute("SELECT id, endpoint, sequence FROM deliveries ORDER BY id DESC")
        assert added.fetchone() == (3, "logged", 3)
