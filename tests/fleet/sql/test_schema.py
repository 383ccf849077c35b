import asyncio
import hashlib
import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from proofserve.fleet.records import MemberSource, StoreUnavailable
from proofserve.fleet.sql.database import FleetDatabase, database_url, shown, version_of
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.sql.tables import metadata, versions
from proofserve.outbox.store import SqliteOutbox

from .support import members_of

pytestmark = pytest.mark.anyio


def differences(connection: Connection) -> list[object]:
    ours = set(metadata.tables)
    context = MigrationContext.configure(
        connection,
        opts={
            "version_table": versions.name,
            "include_name": lambda name, kind, _parents: kind != "table" or name in ours,
        },
    )
    found: list[object] = compare_metadata(context, metadata)
    return found


async def test_the_migrations_lead_to_the_tables_of_the_code(url: str) -> None:
    database = await FleetDatabase.open(database_url(url))
    try:
        assert await database.read(differences) == []
        assert await database.read(version_of) == "1"
    finally:
        await database.close()


async def test_a_second_start_changes_nothing(url: str) -> None:
    async with await FleetStore.open(url) as store:
        member = await store.put_member("http://a", "a", MemberSource.LIST)
    async with await FleetStore.open(url) as store:
        assert await members_of(store) == [member]


async def test_many_starts_at_once_migrate_once(url: str) -> None:
    stores = await asyncio.gather(*(FleetStore.open(url) for _ in range(6)))
    await stores[0].put_member("http://a", "a", MemberSource.LIST)
    for store in stores:
        assert len(await members_of(store)) == 1
        await store.close()


async def test_a_newer_database_is_left_alone(url: str) -> None:
    database = await FleetDatabase.open(database_url(url))
    newer = update(versions).values(version_num="9999")
    await database.write(lambda c: c.execute(newer))
    await database.close()
    with pytest.raises(StoreUnavailable, match="version 9999, this proofserve knows up to 1:"):
        await FleetStore.open(url)


async def test_tables_of_others_in_the_database_do_not_matter(url: str) -> None:
    database = FleetDatabase(database_url(url))
    await database.write(lambda c: c.execute(text("CREATE TABLE members (id INTEGER)")))
    await database.close()
    async with await FleetStore.open(url) as store:
        assert await members_of(store) == []


async def test_an_outbox_is_not_taken_for_a_fleet(tmp_path: Path) -> None:
    path = tmp_path / "outbox.sqlite"
    await (await SqliteOutbox.open(path)).close()
    before = path.read_bytes()
    with pytest.raises(StoreUnavailable, match="an outbox for example"):
        await FleetStore.open(str(path))
    assert path.read_bytes() == before


async def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreUnavailable, match=r"fleet\.sqlite failed: file is not a database"):
        await FleetStore.open(str(path))
    with pytest.raises(StoreUnavailable, match="unable to open"):
        await FleetStore.open(str(tmp_path / "no" / "folder"))


async def test_what_is_on_disk_is_safe_from_power_failures(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"
    database = await FleetDatabase.open(database_url(str(path)))
    pragmas = [
        await database.read(lambda c, n=name: c.execute(text(f"PRAGMA {n}")).scalar())
        for name in ("journal_mode", "synchronous", "foreign_keys")
    ]
    await database.close()
    assert pragmas == ["wal", 2, 1]
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize(
    ("text_", "expected"),
    [
        ("postgres://u:secret@db:5432/fleet", "postgresql+psycopg://u:***@db:5432/fleet"),
        ("postgresql://db/fleet?sslmode=require", "postgresql+psycopg://db/fleet"),
        ("sqlite:////var/fleet.db", "sqlite:////var/fleet.db"),
        ("/var/fleet.db", "sqlite:////var/fleet.db"),
    ],
)
def test_addresses_of_databases(text_: str, expected: str) -> None:
    assert shown(database_url(text_)) == expected


@pytest.mark.parametrize(
    "wrong",
    ["", "mysql://u:secret@db/x", "sqlite://", "sqlite:///:memory:", "postgresql://[u:secret"],
)
def test_other_addresses_are_refused_without_their_password(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"give postgresql://") as caught:
        database_url(wrong)
    assert "secret" not in str(caught.value)


def test_a_change_of_the_tables_is_noticed() -> None:
    """Before the first release the digest changes, too; after it see ``_create_tables``."""
    made = [CreateTable(each) for each in metadata.sorted_tables]
    indexes = [index for each in metadata.sorted_tables for index in each.indexes]
    made += [CreateIndex(each) for each in sorted(indexes, key=lambda index: str(index.name))]
    statements = "\n".join(str(each.compile(dialect=postgresql.dialect())) for each in made)
    assert hashlib.blake2b(statements.encode(), digest_size=8).hexdigest() == "07476e815ba642f7"
