import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from proofserve.outbox.database import Database
from proofserve.rounds.errors import OutboxUnavailable

pytestmark = pytest.mark.anyio


async def test_a_new_file_has_the_required_safety_settings(path: Path) -> None:
    database = await Database.open(path)
    settings = await database.read(
        lambda c: [
            c.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "foreign_keys", "user_version")
        ]
    )
    await database.close()
    await database.close()
    assert settings == ["wal", 2, 1, 6]


@pytest.mark.parametrize(
    ("version", "complaint"),
    [
        (7, "has version 7, this proofserve reads up to 6: use the newer proofserve"),
        (5, "has version 5, this proofserve reads 6 only: have the older one send what the file"),
    ],
)
async def test_a_file_of_another_version_is_refused_and_not_changed(
    path: Path, version: int, complaint: str
) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(OutboxUnavailable, match=complaint):
        await Database.open(path)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert other.execute("SELECT * FROM sqlite_master").fetchall() == []
    assert [each.name for each in path.parent.iterdir()] == [path.name]


async def test_a_database_of_something_else_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE recipes (name)")
    with pytest.raises(OutboxUnavailable, match="another program"):
        await Database.open(path)


async def test_a_file_that_is_not_a_database_is_unavailable(path: Path, tmp_path: Path) -> None:
    shutil.copyfile(__file__, path)
    with pytest.raises(OutboxUnavailable, match=r"\.sqlite failed: file is not a database"):
        await Database.open(path)
    with pytest.raises(OutboxUnavailable, match="is a folder: name a file"):
        await Database.open(tmp_path)


async def test_work_that_fails_changes_nothing(path: Path) -> None:
    def half(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE half (x)")
        raise KeyError("the other half")

    database = await Database.open(path)
    with pytest.raises(KeyError):
        await database.write(half)
    with pytest.raises(OutboxUnavailable, match="no such table: half"):
        await database.read(lambda c: c.execute("SELECT * FROM half"))
    await database.close()


async def test_a_slow_disk_does_not_stop_the_event_loop(path: Path) -> None:
    database = await Database.open(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        # A lock held elsewhere keeps the transaction waiting, as a slow disk would.
        other.execute("BEGIN IMMEDIATE")
        write = asyncio.create_task(database.write(lambda c: c.execute("PRAGMA user_version = 6")))
        ticks = 0
        for _ in range(20):
            await asyncio.sleep(0.005)
            ticks += not write.done()
        other.execute("ROLLBACK")
        await write
    await database.close()
    assert ticks == 20


async def test_a_closed_outbox_raises_an_error_that_names_it(path: Path) -> None:
    database = await Database.open(path)
    await database.close()
    with pytest.raises(OutboxUnavailable, match="is closed"):
        await database.read(lambda c: c.execute("SELECT 1"))
