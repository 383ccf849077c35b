"""What was delivered long ago is deleted, in steps; counts and the disjointness of lanes stay."""

from collections.abc import AsyncIterator

import pytest

from proofserve.fleet.sql.store import FleetStore
from proofserve.outbox.planning import CallbackPolicy
from proofserve.rounds.state import Move

from .support import a_lane, a_spec, lanes_of, nonces_of, vectors_of

pytestmark = pytest.mark.anyio

URL = "http://network"
HOUR = 3600.0
ALL_DUE = CallbackPolicy(interval_s=0.0)


class SetClock:
    """A wall clock that a test moves on."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
async def store(url: str, clock: SetClock) -> AsyncIterator[FleetStore]:
    async with await FleetStore.open(url, clock) as opened:
        yield opened


async def deliver(store: FleetStore) -> int:
    count = 0
    while due := (await store.plan(ALL_DUE, flushing=True)).due:
        for each in due:
            await store.acknowledge(each)
            count += 1
    return count


async def delete_all(store: FleetStore) -> int:
    steps = 0
    while await store.delete_delivered(HOUR):
        steps += 1
        assert steps < 100
    return steps


async def nonces(store: FleetStore) -> list[int]:
    return [row.nonce for row in await store.results(0, 10_000)]


async def test_old_delivered_batches_go_and_counts_stay(store: FleetStore, clock: SetClock) -> None:
    opened, lane = await a_lane(store, a_spec(url=URL))
    for number in range(500):
        found = vectors_of(nonces_of(opened, lane, 2 * number, 2))
        await store.ingest(opened, lane, f"k{number}", found)
    assert await deliver(store) == 1
    clock.now += HOUR - 10.0
    recent = nonces_of(opened, lane, 1000, 3)
    await store.ingest(opened, lane, "recent", vectors_of(recent))
    assert not await store.delete_delivered(HOUR)
    clock.now += 20.0
    assert await delete_all(store) == 3
    assert await nonces(store) == list(recent)
    # The next seq goes on, so a reader sees a gap and nothing twice.
    assert [row.seq for row in await store.results(0, 1)] == [1001]
    (progress,) = await lanes_of(store, opened.id)
    assert (progress.batches, progress.stored) == (501, 1003)
    gauges = await store.gauges()
    assert (gauges.results, gauges.pending, gauges.delivered) == (1003, 0, 1)
    assert await deliver(store) == 1


async def test_a_late_repeat_of_a_deleted_callback_is_known(
    store: FleetStore, clock: SetClock
) -> None:
    """A callback that never came before is stored, though later ones of its lane are deleted."""
    opened, lane = await a_lane(store, a_spec(url=URL))
    for start in (0, 4, 12):
        found = vectors_of(nonces_of(opened, lane, start, 4))
        await store.ingest(opened, lane, f"k{start}", found)
        await deliver(store)
    clock.now += 2 * HOUR
    await delete_all(store)
    assert await nonces(store) == []
    for key, start in (("k4", 4), ("another key", 6), ("expired", 8)):
        await store.ingest(opened, lane, key, vectors_of(nonces_of(opened, lane, start, 4)))
    assert await nonces(store) == list(nonces_of(opened, lane, 8, 4))
    (progress,) = await lanes_of(store, opened.id)
    assert progress.stored == 16


async def test_what_was_not_delivered_stays(store: FleetStore, clock: SetClock) -> None:
    opened, lane = await a_lane(store, a_spec(url=URL))
    kept = nonces_of(opened, lane, 0, 3)
    await store.ingest(opened, lane, "k", vectors_of(kept))
    (pending,) = (await store.plan(ALL_DUE, flushing=True)).due
    await store.move(Move.STOP)
    clock.now += 100 * HOUR
    assert await delete_all(store) == 0
    await store.fail(pending, "refused", None)
    clock.now += 100 * HOUR
    assert await delete_all(store) == 0
    assert await nonces(store) == list(kept)


async def test_a_round_without_callbacks_counts_as_delivered_when_it_has_ended(
    store: FleetStore, clock: SetClock
) -> None:
    opened, lane = await a_lane(store)
    await store.ingest(opened, lane, "k", vectors_of(nonces_of(opened, lane, 0, 3)))
    clock.now += 2 * HOUR
    assert await delete_all(store) == 0
    await store.move(Move.STOP)
    assert await delete_all(store) == 0
    late = nonces_of(opened, lane, 3, 2)
    clock.now += HOUR - 10.0
    await store.ingest(opened, lane, "late", vectors_of(late))
    clock.now += 20.0
    assert await delete_all(store) == 1
    assert await nonces(store) == list(late)
