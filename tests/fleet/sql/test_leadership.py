import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from endurance.fleet.postgres import Postgres
from proofserve.fleet.sql.locks import LEADER, Leadership, process_lock
from proofserve.fleet.sql.store import FleetStore
from support.pace import PACE

pytestmark = pytest.mark.anyio

HERE = Path(__file__).parent


@asynccontextmanager
async def running(leadership: Leadership) -> AsyncIterator[Leadership]:
    task = asyncio.create_task(leadership.run())
    try:
        yield leadership
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@contextmanager
def a_process(url: str) -> Iterator["subprocess.Popen[str]"]:
    """Another controller, once it leads."""
    command = [sys.executable, "-m", "tests.fleet.sql.giver", url]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[2]
    ) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "True\n"
            yield started
        finally:
            started.kill()


async def until_held(leadership: Leadership, held: bool, timeout_s: float = 10.0) -> float:
    start = time.monotonic()
    async with asyncio.timeout(timeout_s * PACE):
        while leadership.held is not held:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    return time.monotonic() - start


async def test_one_of_two_leads_and_the_other_follows(url: str) -> None:
    await (await FleetStore.open(url)).close()
    changes: list[bool] = []
    second = Leadership(url, 0.1, changed=lambda: changes.append(second.held))
    async with running(Leadership(url, 0.1)) as first:
        await until_held(first, held=True)
        async with running(second):
            await asyncio.sleep(0.5)
            assert (first.held, second.held) == (True, False)
    assert (first.held, changes) == (False, [])
    async with running(second):
        await until_held(second, held=True)
    assert changes == [True, False]


async def test_another_leads_within_ten_seconds_of_a_kill(url: str) -> None:
    await (await FleetStore.open(url)).close()
    with a_process(url) as process:
        async with running(Leadership(url)) as next_:
            await asyncio.sleep(1.5)
            assert not next_.held
            process.send_signal(signal.SIGKILL)
            seconds = await until_held(next_, held=True)
    print(f"led {seconds:.2f} s after the kill")


async def test_a_lost_connection_ends_the_lead(server: Postgres) -> None:
    url = server.database()
    async with running(Leadership(url, 0.1)) as leader:
        await until_held(leader, held=True)
        with psycopg.connect(url, autocommit=True) as connection:
            ended = connection.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory')"
            ).fetchone()
            assert ended == (1,)
            await until_held(leader, held=False)
        await until_held(leader, held=True)


async def test_without_a_database_no_process_leads() -> None:
    async with running(Leadership("postgresql://postgres@127.0.0.1:9/none", 0.05)) as leader:
        await asyncio.sleep(0.3)
        assert not leader.held


async def test_a_deleted_lock_file_ends_the_lead(tmp_path: Path) -> None:
    path = tmp_path / "fleet.sqlite"
    changes: list[bool] = []
    leader = Leadership(str(path), 0.05, changed=lambda: changes.append(leader.held))
    async with running(leader):
        await until_held(leader, held=True)
        # Both in one step of the loop, before the leader makes the file anew.
        (tmp_path / "fleet.sqlite.leader").unlink()
        other = process_lock(str(path), LEADER)
        assert await other.take()
        await until_held(leader, held=False)
    await other.give_back()
    assert changes == [True, False]
