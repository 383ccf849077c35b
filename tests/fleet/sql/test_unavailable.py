"""A database that is gone for a while, and one that stays silent."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from endurance.fleet.postgres import NoPostgres, Postgres, postgres
from proofserve.fleet.records import MemberSource, StoreUnavailable
from proofserve.fleet.sql.database import FleetDatabase, database_url
from proofserve.fleet.sql.store import FleetStore
from proofserve.rounds.state import State

from .support import a_lane, a_spec, give_lane, members_of, nonces_of, vectors_of

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def own_server() -> Iterator[Postgres]:
    """A server that these tests may stop."""
    try:
        with postgres() as started:
            yield started
    except NoPostgres as error:
        pytest.skip(f"no PostgreSQL can be started here: {error}")


async def test_what_was_stored_survives_a_crash_of_the_database(own_server: Postgres) -> None:
    async with await FleetStore.open(own_server.database()) as store:
        opened, lane = await a_lane(store, a_spec(url="http://127.0.0.1:9/x"))
        first = vectors_of(nonces_of(opened, lane, 0, 50))
        assert await store.ingest(opened, lane, "k1", first)
        own_server.stop("immediate")
        try:
            second = vectors_of(nonces_of(opened, lane, 50, 50))
            for call in (
                store.ingest(opened, lane, "k2", second),
                store.view(),
                store.probe(),
                give_lane(store, opened.id, lane.member_id),
                store.results(0, 10),
            ):
                with pytest.raises(StoreUnavailable, match="postgresql"):
                    await call
        finally:
            own_server.start()
        # The member sends again what was not acknowledged, and what was.
        assert await store.ingest(opened, lane, "k1", first) is False
        assert await store.ingest(opened, lane, "k2", second) is True
        view = await store.view()
        assert (view.desired.state, view.lanes[0].stored) == (State.GENERATING, 100)
        found = await store.results(0, 1000)
        assert [each.seq for each in found] == list(range(1, 101))
        assert [each.nonce for each in found] == list(nonces_of(opened, lane, 0, 100))


async def test_a_server_that_stays_silent_is_an_error_after_a_while(own_server: Postgres) -> None:
    database = await FleetDatabase.open(database_url(own_server.database()))
    store = FleetStore(database, clock=lambda: 1.0)
    # The processes of the server's connections are its children, and are stopped as well.
    stopped = [own_server.pid, *own_server.children()]

    def signal_all(number: signal.Signals) -> None:
        for pid in stopped:
            # A child may have ended: those that clean up do so by themselves.
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    try:
        signal_all(signal.SIGSTOP)
        with (
            patch.object(database, "_answer_s", 1.0),
            pytest.raises(StoreUnavailable, match="did not answer in 1 s"),
        ):
            await store.put_member("http://a", "a", MemberSource.LIST)
    finally:
        signal_all(signal.SIGCONT)
    await store.put_member("http://a", "a", MemberSource.LIST)
    assert len(await members_of(store)) == 1
    await store.close()


async def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A second program that holds the file for longer than we wait."""
    path = tmp_path / "fleet.sqlite"
    async with await FleetStore.open(str(path)) as store:
        opened, lane = await a_lane(store)
        found = vectors_of(nonces_of(opened, lane, 0, 5))
        other = FleetDatabase(database_url(str(path)))
        held = asyncio.Event()
        loop = asyncio.get_running_loop()
        release = asyncio.Event()

        def hold(_connection: object) -> None:
            loop.call_soon_threadsafe(held.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

        holding = asyncio.create_task(other.write(hold))
        await held.wait()
        with pytest.raises(StoreUnavailable, match="database is locked"):
            await store.ingest(opened, lane, "k", found)
        # Readers do not wait for writers.
        assert await store.results(0, 10) == []
        release.set()
        await holding
        assert await store.ingest(opened, lane, "k", found) is True
        await other.close()


async def test_a_closed_store_says_so(url: str) -> None:
    store = await FleetStore.open(url)
    await store.close()
    await store.close()
    with pytest.raises(StoreUnavailable, match="is closed"):
        await members_of(store)


async def test_closing_waits_for_what_is_being_stored(url: str) -> None:
    store = await FleetStore.open(url)
    opened, lane = await a_lane(store)
    calls = [
        asyncio.create_task(
            store.ingest(opened, lane, f"k{n}", vectors_of(nonces_of(opened, lane, n * 10, 10)))
        )
        for n in range(20)
    ]
    while not store._writer._waiting:  # noqa: ASYNC110 - until the callbacks are in the queue
        await asyncio.sleep(0)
    await store.close()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    stored = sum(end is True for end in ends)
    assert all(end is True or isinstance(end, StoreUnavailable) for end in ends)
    async with await FleetStore.open(url) as again:
        assert len(await again.results(0, 1000)) == stored * 10 > 0
