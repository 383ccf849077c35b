"""The server deletes results that were delivered long ago, and nothing else."""

import asyncio
from pathlib import Path

import pytest

from proofserve.outbox import offline
from proofserve.outbox.planning import CallbackPolicy
from proofserve.outbox.pruning import Pruned
from proofserve.outbox.store import SqliteOutbox
from proofserve.rounds.records import RoundProgress

from .support import a_distance_spec, a_spec, artifacts, progress_of, winners

pytestmark = pytest.mark.anyio

URL = "http://a"
DAY = 86_400.0
POLICY = CallbackPolicy(max_artifacts=10, interval_s=0.0)


class SetClock:
    """A wall clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


async def deliver(store: SqliteOutbox, most: int = 1_000_000) -> int:
    """Acknowledge at most ``most`` due callbacks; return their number."""
    count = 0
    while count < most and (due := (await store.plan(POLICY, flushing=True)).due):
        for delivery in due[: most - count]:
            await store.acknowledge(delivery)
            count += 1
    return count


async def nonces(store: SqliteOutbox) -> list[int]:
    return [row.nonce for row in await store.results(0, 10_000)]


async def test_old_delivered_results_and_their_callbacks_are_deleted(
    store: SqliteOutbox, clock: SetClock
) -> None:
    await store.open_round(a_spec(url=URL))
    await store.record("r1", 1, artifacts(3, 7), {})
    assert await deliver(store) == 1
    clock.now += DAY
    await store.record("r1", 2, artifacts(11), {})
    assert await deliver(store) == 1
    assert await store.prune(2 * DAY) == Pruned(0, 0, 0)
    clock.now += DAY + 1
    assert await store.prune(2 * DAY) == Pruned(results=2, callbacks=1, rounds=0)
    assert await nonces(store) == [11]
    assert await store.prune(2 * DAY) == Pruned(0, 0, 0)


async def test_undelivered_results_stay_at_any_age(store: SqliteOutbox, clock: SetClock) -> None:
    await store.open_round(a_spec(url=URL))
    await store.record("r1", 1, artifacts(*range(30)), {})
    await store.enqueue("validated", "http://b", {"n": 1})
    (first, other) = (await store.plan(POLICY, flushing=True)).due
    await store.fail(first, "HTTP 500: no", None)
    await store.fail(other, "HTTP 500: no", 1.0)
    (second,) = [one for one in (await store.plan(POLICY, flushing=True)).due if one.url == URL]
    await store.acknowledge(second)
    await store.close_round("r1")
    clock.now += 1000 * DAY
    # Ten results expired, ten are delivered, ten are in no callback yet.
    assert await store.prune(DAY) == Pruned(results=10, callbacks=1, rounds=0)
    assert await nonces(store) == [*range(10), *range(20, 30)]
    gauges = await store.gauges()
    assert (gauges.pending, gauges.expired, gauges.delivered) == (1, 1, 1)


async def test_a_round_without_a_url_counts_as_delivered_when_it_has_ended(
    store: SqliteOutbox, clock: SetClock
) -> None:
    await store.open_round(a_spec("r1"))
    await store.record("r1", 1, artifacts(3, 7), {11: "not finite"})
    clock.now += 10 * DAY
    assert await store.prune(DAY) == Pruned(0, 0, 0)
    await store.close_round("r1")
    clock.now += 0.5 * DAY
    # A second close does not change the age.
    await store.close_round("r1")
    await store.open_round(a_spec("r2"))
    assert await store.prune(DAY) == Pruned(0, 0, 0)
    clock.now += 0.6 * DAY
    assert await store.prune(DAY) == Pruned(results=3, callbacks=0, rounds=1)
    with pytest.raises(ValueError, match="never opened"):
        await store.close_round("r1")


async def test_failures_are_deleted_with_their_ended_round(
    store: SqliteOutbox, clock: SetClock
) -> None:
    await store.open_round(a_spec(url=URL))
    await store.record("r1", 1, [], {3: "not finite"})
    await store.record("r1", 2, artifacts(7), {11: "not finite"})
    await deliver(store)
    await store.close_round("r1")
    await store.open_round(a_spec("r2"))
    clock.now += DAY + 1
    assert await store.prune(DAY) == Pruned(results=3, callbacks=1, rounds=1)


async def test_the_newest_round_continues_after_its_results_were_deleted(
    store: SqliteOutbox, clock: SetClock
) -> None:
    await store.open_round(a_spec(url=URL))
    await store.record("r1", 3, artifacts(3, 7), {11: "not finite"})
    await deliver(store)
    await store.close_round("r1")
    clock.now += DAY + 1
    assert await store.prune(DAY) == Pruned(results=3, callbacks=1, rounds=0)
    assert await store.open_round(a_spec(url=URL)) == RoundProgress(3, found=2, failed=1)
    await store.record("r1", 4, artifacts(15), {})
    assert await progress_of(store, "r1") == RoundProgress(4, found=3, failed=1)


async def test_old_winners_are_deleted_too(store: SqliteOutbox, clock: SetClock) -> None:
    await store.open_round(a_distance_spec(url=URL))
    await store.record("d1", 1, winners(3, 7), {})
    await deliver(store)
    clock.now += DAY + 1
    await store.record("d1", 2, winners(11), {})
    assert await store.prune(DAY) == Pruned(results=2, callbacks=1, rounds=0)
    assert await store.winners("d1", 10) == winners(11)


async def test_sequence_numbers_and_counts_continue_after_pruning(
    path: Path, store: SqliteOutbox, clock: SetClock
) -> None:
    await store.open_round(a_spec(url=URL))
    await store.record("r1", 1, artifacts(3, 7), {})
    await store.enqueue("validated", f"{URL}/", {"n": 1})
    assert await deliver(store) == 2
    clock.now += DAY + 1
    assert await store.prune(DAY) == Pruned(results=2, callbacks=2, rounds=0)
    await store.record("r1", 2, artifacts(11), {})
    (delivery,) = (await store.plan(POLICY, flushing=True)).due
    assert delivery.sequence == 3
    (row,) = await store.results(0, 10)
    assert row.seq == 3
    gauges = await store.gauges()
    assert (gauges.delivered, gauges.pending, gauges.results) == (2, 1, 1)


async def test_a_reader_of_results_continues_after_a_gap(
    store: SqliteOutbox, clock: SetClock
) -> None:
    await store.open_round(a_spec(url=URL))
    await store.record("r1", 1, artifacts(*range(10)), {})
    await deliver(store)
    page = await store.results(0, 4)
    clock.now += DAY + 1
    await store.record("r1", 2, artifacts(*range(10, 20)), {})
    await store.prune(DAY)
    rows = []
    while page:
        rows += page
        page = await store.results(page[-1].seq, 4)
    assert [row.nonce for row in rows] == [*range(4), *range(10, 20)]


async def test_the_server_works_between_the_steps(store: SqliteOutbox, clock: SetClock) -> None:
    await store.open_round(a_spec("r1"))
    await store.record("r1", 1, artifacts(*range(5000)), {})
    await store.open_round(a_spec("r2"))
    clock.now += DAY + 1
    pruning = asyncio.create_task(store.prune(DAY))
    stored = 0
    while not pruning.done():
        stored += 1
        await store.record("r2", stored, artifacts(stored), {})
    assert pruning.result() == Pruned(results=5000, callbacks=0, rounds=1)
    assert stored > 2
    assert len(await nonces(store)) == stored


async def test_pruning_continues_at_the_next_start_after_an_interruption(
    path: Path, clock: SetClock
) -> None:
    async with await SqliteOutbox.open(path, clock) as store:
        await store.open_round(a_spec("r1"))
        await store.record("r1", 1, artifacts(*range(5000)), {})
        await store.open_round(a_spec("r2"))
        clock.now += DAY + 1
        pruning = asyncio.create_task(store.prune(DAY))
        await asyncio.sleep(0.1)
        pruning.cancel()
    async with await SqliteOutbox.open(path, clock) as store:
        assert (await store.gauges()).results == len(await nonces(store))
        await store.prune(DAY)
        assert await nonces(store) == []


def size(path: Path) -> int:
    return path.stat().st_size


async def test_the_file_shrinks(path: Path, clock: SetClock) -> None:
    async with await SqliteOutbox.open(path, clock) as store:
        await store.open_round(a_spec("r1"))
        await store.record("r1", 1, artifacts(*range(20_000)), {})
        await store.open_round(a_spec("r2"))
    large = size(path)
    clock.now += DAY + 1
    async with await SqliteOutbox.open(path, clock) as store:
        assert (await store.prune(DAY)).results == 20_000
    assert size(path) < large / 4


async def test_a_command_prunes_and_shrinks_a_file_in_use(path: Path, clock: SetClock) -> None:
    async with await SqliteOutbox.open(path, clock) as store:
        await store.open_round(a_spec("r1"))
        await store.record("r1", 1, artifacts(*range(20_000)), {})
        await store.open_round(a_spec("r2"))
    large = size(path)
    async with await SqliteOutbox.open(path, clock) as store:
        deleted = await asyncio.to_thread(offline.prune, path, clock.now + 1)
        assert deleted == Pruned(20_000, 0, 1)
        assert await nonces(store) == []
        await store.record("r2", 1, artifacts(3), {})
    assert size(path) < large / 4
    async with await SqliteOutbox.open(path, clock) as store:
        assert await nonces(store) == [3]
