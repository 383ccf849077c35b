"""The results of a distance round: rows, readers and callbacks (protocol A.8)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proofserve.outbox import callbacks
from proofserve.outbox.planning import CallbackPolicy, SendPlan
from proofserve.outbox.sender import CallbackSender
from proofserve.outbox.store import SqliteOutbox
from proofserve.rounds.records import RoundProgress, StoredResult, Winner
from support.pace import until

from .support import (
    Target,
    a_distance_spec,
    a_spec,
    artifacts,
    progress_of,
    running_target,
    sending,
    winners,
)

pytestmark = pytest.mark.anyio

URL = "http://a"
SLOW = CallbackPolicy(interval_s=3600.0)


async def _body(store: SqliteOutbox, plan: SendPlan) -> dict[str, Any]:
    (only,) = plan.due
    body: dict[str, Any] = json.loads(await store.body(only))
    return body


class TestReaders:
    async def test_the_newest_winners_come_in_the_order_of_storing(
        self, store: SqliteOutbox
    ) -> None:
        await store.open_round(a_distance_spec())
        # The order of a lane, with a later batch that begins at a lower nonce.
        for nonces in ((7, 3), (31, 23), (11,)):
            await store.record("d1", 1, winners(*nonces), {nonces[0] + 1: "not finite"})
        assert await store.winners("d1", 10) == winners(7, 3, 31, 23, 11)
        assert await store.winners("d1", 3) == winners(31, 23, 11)
        assert await store.winners("d1", 0) == []
        assert await store.winners("d1", -1) == []

    async def test_rows_of_other_rounds_are_not_mixed_in(self, store: SqliteOutbox) -> None:
        await store.open_round(a_spec())
        await store.record("r1", 1, artifacts(3), {})
        await store.open_round(a_distance_spec("d1"))
        await store.record("d1", 1, winners(3), {})
        await store.open_round(a_distance_spec("d2"))
        await store.record("d2", 1, winners(5), {})
        # Late rows of the earlier rounds, and then an earlier round again.
        await store.record("d1", 2, winners(7), {})
        await store.record("r1", 2, artifacts(7), {})
        await store.open_round(a_distance_spec("d1"))
        await store.record("d1", 3, winners(11), {})
        assert await store.winners("d1", 10) == winners(3, 7, 11)
        assert await store.winners("d1", 2) == winners(7, 11)
        assert await store.winners("d2", 10) == winners(5)
        for other in ("r1", "never opened"):
            assert await store.winners(other, 10) == []

    async def test_a_float32_comes_back_bit_for_bit(self, path: Path) -> None:
        steps = np.random.default_rng(3).random(500, dtype=np.float32) * np.float32(2)
        edges = np.array([0.0, 1e-45, 1.1754942e-38, 0.1, 1.9999999, 2.0], dtype=np.float32)
        values = np.concatenate([edges, steps])
        stored = [Winner(nonce, float(value)) for nonce, value in enumerate(values)]
        async with await SqliteOutbox.open(path) as store:
            await store.open_round(a_distance_spec(url=URL))
            await store.record("d1", 512, stored, {})
        async with await SqliteOutbox.open(path) as store:
            assert await store.winners("d1", 1000) == stored
            rows = await store.results(0, 1000)
            assert [row.distance for row in rows] == [one.distance for one in stored]
            sent = (await _body(store, await store.plan(SLOW)))["dist"]
        assert np.array_equal(np.array(sent, dtype=np.float32), values)
        assert sent == [one.distance for one in stored]

    async def test_result_rows_name_their_protocol(self, store: SqliteOutbox) -> None:
        await store.open_round(a_spec())
        await store.record("r1", 1, artifacts(3), {})
        await store.open_round(a_distance_spec())
        await store.record("d1", 32, [Winner(3, 1.25)], {7: "not finite"})
        assert await store.results(0, 10) == [
            StoredResult(1, "r1", 3, value="vector3"),
            StoredResult(2, "d1", 3, distance=1.25),
            StoredResult(3, "d1", 7, error="not finite"),
        ]

    @pytest.mark.parametrize("distance", [float("nan"), float("-inf")])
    async def test_a_distance_without_a_json_value_is_refused_with_its_whole_batch(
        self, store: SqliteOutbox, distance: float
    ) -> None:
        await store.open_round(a_distance_spec())
        with pytest.raises(ValueError, match="not JSON compliant"):
            await store.record("d1", 32, [Winner(3, 1.25), Winner(7, distance)], {})
        assert await store.results(0, 10) == []
        assert await progress_of(store, "d1") == RoundProgress()


class TestCallbacks:
    async def test_the_body_is_that_of_the_protocol(self, store: SqliteOutbox) -> None:
        await store.open_round(a_distance_spec(url=URL))
        await store.record("d1", 32, [Winner(3, 1.25), Winner(11, 0.5)], {7: "not finite"})
        assert await _body(store, await store.plan(SLOW)) == {
            "public_key": "k3y",
            "block_hash": "b10c",
            "block_height": 77,
            "node_id": 3,
            "nonces": [3, 11],
            "dist": [1.25, 0.5],
            "r_target": 1.4,
        }

    async def test_a_body_of_many_pages_is_complete(self, store: SqliteOutbox) -> None:
        everyone = winners(*range(2 * callbacks._PAGE + 5))
        await store.open_round(a_distance_spec("d0"))
        await store.open_round(a_distance_spec("d1", URL))
        for first in range(0, len(everyone), 3000):
            await store.record("d1", first, everyone[first : first + 3000], {})
            await store.record("d0", first, winners(first), {first + 1: "not finite"})
        body = await _body(store, await store.plan(SLOW))
        assert [Winner(*pair) for pair in zip(body["nonces"], body["dist"], strict=True)] == (
            everyone
        )

    async def test_winners_are_cut_at_once_and_artifacts_keep_their_interval(
        self, store: SqliteOutbox
    ) -> None:
        await store.open_round(a_spec(url=URL))
        await store.record("r1", 1, artifacts(3), {})
        assert (await store.plan(SLOW)).due == ()
        await store.open_round(a_distance_spec(url="http://b"))
        (closed,) = (await store.plan(SLOW)).due
        await store.acknowledge(closed)
        for index, nonces in enumerate([(3, 7), (11,)], 1):
            store.news.clear()
            await store.record("d1", 32 * index, winners(*nonces), {})
            assert store.news.is_set()
            plan = await store.plan(SLOW)
            assert [one.sequence for one in plan.due] == [index]
            assert (await _body(store, plan))["nonces"] == list(nonces)
            await store.acknowledge(plan.due[0])

    async def test_batches_that_wait_for_a_slow_target_share_one_callback(
        self, store: SqliteOutbox
    ) -> None:
        await store.open_round(a_distance_spec(url=URL))
        await store.record("d1", 32, winners(3), {})
        (first,) = (await store.plan(SLOW)).due
        await store.record("d1", 64, winners(131), {})
        await store.record("d1", 96, winners(259), {})
        assert (await store.plan(SLOW)).due == (first,)
        await store.acknowledge(first)
        assert (await _body(store, await store.plan(SLOW)))["nonces"] == [131, 259]

    async def test_a_batch_without_winners_advances_and_sends_nothing(
        self, store: SqliteOutbox
    ) -> None:
        await store.open_round(a_distance_spec(url=URL))
        await store.record("d1", 32, [], {})
        await store.record("d1", 64, [], {131: "not finite"})
        assert await store.plan(SLOW) == SendPlan((), None, idle=True)
        assert await progress_of(store, "d1") == RoundProgress(64, found=0, failed=1)
        await store.close_round("d1")
        assert await store.plan(SLOW, flushing=True) == SendPlan((), None, idle=True)

    async def test_a_batch_recorded_twice_is_stored_and_sent_once(
        self, store: SqliteOutbox
    ) -> None:
        await store.open_round(a_distance_spec(url=URL))
        await store.record("d1", 32, winners(3, 7), {11: "not finite"})
        (first,) = (await store.plan(SLOW)).due
        before = await store.results(0, 10)
        await store.acknowledge(first)
        # The answer to the first call was lost, so the batch is recorded again with the next one.
        await store.record("d1", 64, winners(3, 7, 131), {11: "not finite"})
        rows = await store.results(0, 10)
        assert rows[:3] == before
        assert [row.nonce for row in rows[3:]] == [131]
        assert (await _body(store, await store.plan(SLOW)))["nonces"] == [131]
        assert await store.winners("d1", 10) == winners(3, 7, 131)
        assert await progress_of(store, "d1") == RoundProgress(64, found=3, failed=1)

    async def test_a_sender_posts_each_batch_as_it_comes(
        self, store: SqliteOutbox, target: Target
    ) -> None:
        with running_target() as other:
            async with sending(CallbackSender(store, SLOW)):
                await store.open_round(a_spec(url=other.url))
                await store.record("r1", 1, artifacts(3), {})
                await asyncio.sleep(0.05)
                assert other.arrivals == []
                await store.open_round(a_distance_spec(url=target.url))
                await until(lambda: other.nonces() == [3])
                for index in range(3):
                    await store.record("d1", index + 1, winners(index), {})
                    await until(lambda done=index: target.nonces() == [*range(done + 1)])
        assert [one.sequence for one in target.accepted] == [1, 2, 3]
        assert {one.path for one in target.accepted} == {"/generated"}
