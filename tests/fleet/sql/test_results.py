import asyncio

import pytest

from proofserve.fleet.sql.store import FleetStore
from proofserve.rounds.records import StoredResult
from proofserve.rounds.state import Move

from .support import a_distance_spec, a_lane, another_lane, nonces_of, vectors_of, winners_of

pytestmark = pytest.mark.anyio

WRITERS = 6
CALLBACKS = 25


@pytest.mark.parametrize("limit", [1, 3, 7, 64, 1000])
async def test_pages_of_any_size_hold_everything_once(store: FleetStore, limit: int) -> None:
    opened, lane = await a_lane(store)
    start = 0
    for number, size in enumerate((10, 1, 40, 5)):
        found = vectors_of(nonces_of(opened, lane, start, size))
        await store.ingest(opened, lane, f"k{number}", found)
        start += size
    pages: list[StoredResult] = []
    while page := await store.results(pages[-1].seq if pages else 0, limit):
        assert len(page) <= limit
        pages += page
    assert [each.seq for each in pages] == list(range(1, 57))
    assert [each.nonce for each in pages] == list(nonces_of(opened, lane, 0, 56))
    assert pages == await store.results(0, 10_000)
    assert await store.results(0, 0) == []
    assert await store.results(56, 10) == []


async def test_rounds_of_both_protocols_share_the_pages(store: FleetStore) -> None:
    first, lane = await a_lane(store)
    await store.ingest(first, lane, "k", vectors_of(nonces_of(first, lane, 0, 2)))
    await store.move(Move.STOP)
    second, lane = await a_lane(store, a_distance_spec())
    await store.ingest(second, lane, "k", winners_of(nonces_of(second, lane, 0, 2)))
    found = await store.results(1, 3)
    assert [(each.seq, each.round_id, each.value is None) for each in found] == [
        (2, "r1", False),
        (3, "d1", True),
        (4, "d1", True),
    ]


async def test_a_reader_beside_writers_misses_nothing(store: FleetStore, url: str) -> None:
    """Several stores write at once; a page never leaves out a number that appears later."""
    opened, first = await a_lane(store, lanes=WRITERS)
    lanes = [first]
    lanes += [await another_lane(store, opened, f"w{n}") for n in range(WRITERS - 1)]
    stores = [await FleetStore.open(url) for _ in range(3)]
    read: list[int] = []
    done = asyncio.Event()

    async def write(number: int) -> None:
        lane = lanes[number]
        for callback in range(CALLBACKS):
            nonces = nonces_of(opened, lane, callback * 10, 10)
            await stores[number % 3].ingest(opened, lane, f"k{callback}", vectors_of(nonces))

    async def follow() -> None:
        while not done.is_set() or len(read) < WRITERS * CALLBACKS * 10:
            page = await store.results(len(read), 37)
            # A page goes on where the one before it ended, without a gap.
            expected = range(len(read) + 1, len(read) + 1 + len(page))
            assert [each.seq for each in page] == list(expected)
            read.extend(expected)
            if not page:
                await asyncio.sleep(0.001)

    following = asyncio.create_task(follow())
    await asyncio.gather(*(write(number) for number in range(WRITERS)))
    done.set()
    async with asyncio.timeout(60):
        await following
    for other in stores:
        await other.close()
    expected = {nonce for lane in lanes for nonce in nonces_of(opened, lane, 0, CALLBACKS * 10)}
    assert {each.nonce for each in await store.results(0, 10_000)} == expected
