"""An outbox belongs to one server, until that one has closed it or is dead."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from proofserve.outbox.database import Database
from proofserve.outbox.lock import OutboxInUse, claim
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
    with pytest.raises(OutboxInUse, match=r"belongs to another server .* POC_OUTBOX"):
        await Database.open(path)
    # The refusal has taken nothing from the first.
    await first.rewrite_version()
    with pytest.raises(OutboxInUse):
        claim(path)
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


async def test_one_that_does_not_open_is_not_claimed(path: Path) -> None:
    folder = path.parent
    for _ in range(2):
        with pytest.raises(OutboxUnavailable, match="unable to open database file"):
            await Database.open(folder)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(OutboxUnavailable, match="No such file or directory"):
        claim(tmp_path / "nowhere" / "outbox.sqlite")
