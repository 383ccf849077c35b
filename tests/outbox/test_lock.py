"""An outbox belongs to one server until this server closes it or dies."""

import asyncio
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from proofserve.outbox.database import Database, OutboxInUse, hold_lock
from proofserve.rounds.errors import OutboxUnavailable

pytestmark = pytest.mark.anyio

SERVER = """
import asyncio, sys, time
from pathlib import Path
from proofserve.outbox.database import Database

async def main():
    database = await Database.open(Path(sys.argv[1]))
    print("open", flush=True)
    time.sleep(600)

asyncio.run(main())
"""


async def test_a_second_server_is_refused_until_the_first_has_closed(path: Path) -> None:
    first = await Database.open(path)
    with pytest.raises(OutboxInUse, match=r"another running server uses the outbox .* POC_OUTBOX"):
        await Database.open(path)
    # The refusal does not disturb the first server.
    await first.write(lambda c: c.execute("PRAGMA user_version = 6"))
    with pytest.raises(OutboxInUse):
        hold_lock(path)
    await first.close()
    await (await Database.open(path)).close()


async def test_a_server_that_is_killed_leaves_its_outbox_to_the_next(path: Path) -> None:
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, path, stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    assert await server.stdout.readline() == b"open\n"
    with pytest.raises(OutboxInUse):
        await Database.open(path)
    server.kill()
    await server.wait()
    await (await Database.open(path)).close()


def files_beside(path: Path) -> set[Path]:
    return set(path.parent.iterdir())


async def test_a_folder_is_refused_and_gets_no_lock_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for _ in range(2):
        with pytest.raises(OutboxUnavailable, match="is a folder: name a file"):
            await Database.open(folder)
    assert files_beside(folder) == {folder}


async def test_a_file_that_is_not_an_outbox_gets_no_lock_file(path: Path) -> None:
    with path.open("w") as file:
        file.write("dear diary" * 100)
    with pytest.raises(OutboxUnavailable, match="not a database"):
        await Database.open(path)
    assert files_beside(path) == {path}


@pytest.mark.parametrize("mode", ["delete", "wal"])
async def test_a_database_of_something_else_gets_no_lock_beside_it(path: Path, mode: str) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA journal_mode = {mode}")
        other.execute("CREATE TABLE diary (page TEXT)")
    with pytest.raises(OutboxUnavailable, match="another program"):
        await Database.open(path)
    assert files_beside(path) == {path}


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutboxUnavailable, match="No such file or directory"):
        hold_lock(tmp_path / "nowhere" / "outbox.sqlite")
