import asyncio
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proofserve.outbox.planning import CallbackPolicy, SendPlan
from proofserve.outbox.store import SqliteOutbox

from .support import a_spec, artifacts, nonces_of

URL = "http://a"
POLICY = CallbackPolicy()


@dataclass
class HandClock:
    now: float = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.mark.anyio
class TestRounds:
    async def test_the_first_delivery_waits_for_the_interval(
        self, store: SqliteOutbox, clock: HandClock
    ) -> None:
        await store.open_round(a_spec(url=URL))
        assert await store.plan(POLICY) == SendPlan((), None, idle=True)
        await store.record("r1", 1, artifacts(3), {})
        clock.now += 2.0
        await store.record("r1", 2, artifacts(7), {})
        assert await store.plan(POLICY) == SendPlan((), 3.0, idle=False)
        clock.now += 3.0
        plan = await store.plan(POLICY)
        assert [one.sequence for one in plan.due] == [1]
        assert await _nonces(store, plan) == [3, 7]

    async def test_the_next_one_waits_for_the_interval_and_for_the_one_before(
        self, store: SqliteOutbox, clock: HandClock
    ) -> None:
        await store.open_round(a_spec(url=URL))
        await store.record("r1", 1, artifacts(3), {})
        clock.now += 5.0
        first = await store.plan(POLICY)
        await store.record("r1", 2, artifacts(7), {})
        clock.now += 60.0
        assert (await store.plan(POLICY)).due == first.due
        await store.acknowledge(first.due[0])
        second = await store.plan(POLICY)
        assert await _nonces(store, second) == [7]
        await store.acknowledge(second.due[0])
        await store.record("r1", 3, artifacts(11), {})
        assert (await store.plan(POLICY)).wait_s == 5.0

    async def test_closing_and_flushing_do_not_wait(self, store: SqliteOutbox) -> None:
        await store.open_round(a_spec("r1", url=URL))
        await store.record("r1", 1, artifacts(3), {})
        await store.close_round("r1")
        await store.open_round(a_spec("r2", url=f"{URL}/2"))
        await store.record("r2", 1, artifacts(4), {})
        closed = await store.plan(POLICY)
        assert await _nonces(store, closed) == [3]
        flushed = await store.plan(POLICY, flushing=True)
        assert [one.url for one in flushed.due] == [URL, f"{URL}/2"]

    async def test_a_result_after_the_close_is_due_too(self, store: SqliteOutbox) -> None:
        await store.open_round(a_spec(url=URL))
        await store.record("r1", 1, artifacts(3), {})
        await store.close_round("r1")
        store.news.clear()
        await store.record("r1", 2, artifacts(7), {})
        assert store.news.is_set()
        assert await _nonces(store, await store.plan(POLICY)) == [3, 7]

    async def test_only_the_first_waiting_result_wakes_the_sender(
        self, store: SqliteOutbox
    ) -> None:
        await store.open_round(a_spec(url=URL))
        await store.record("r1", 1, artifacts(3), {})
        store.news.clear()
        await store.record("r1", 2, artifacts(7), {})
        assert not store.news.is_set()

    async def test_a_round_without_url_is_kept_but_never_sent(self, store: SqliteOutbox) -> None:
        await store.open_round(a_spec())
        await store.record("r1", 1, artifacts(3), {})
        await store.close_round("r1")
        assert await store.plan(POLICY, flushing=True) == SendPlan((), None, idle=True)

    async def test_failures_alone_are_not_sent(self, store: SqliteOutbox) -> None:
        await store.open_round(a_spec(url=URL))
        await store.record("r1", 1, [], {3: "not finite"})
        await store.close_round("r1")
        assert await store.plan(POLICY) == SendPlan((), None, idle=True)
        await store.record("r1", 2, artifacts(7), {11: "not finite"})
        assert await _nonces(store, await store.plan(POLICY)) == [7]

    async def test_the_body_is_that_of_the_protocol(self, store: SqliteOutbox) -> None:
        await store.open_round(a_spec(url=URL, k_dim=5))
        await store.record("r1", 3, artifacts(3, 11), {7: "not finite"})
        await store.close_round("r1")
        plan = await store.plan(POLICY)
        body = await store.body(plan.due[0])
        assert (
            body
            == json.dumps(
                {
                    "public_key": "k3y",
                    "block_hash": "b10c",
                    "block_height": 77,
                    "node_id": 3,
                    "artifacts": [
                        {"nonce": 3, "vector_b64": "vector3"},
                        {"nonce": 11, "vector_b64": "vector11"},
                    ],
                    "encoding": {"dtype": "f16", "k_dim": 5, "endian": "le"},
                },
                separators=(",", ":"),
            ).encode()
        )

    async def test_a_body_of_many_pages_is_complete(self, store: SqliteOutbox) -> None:
        await store.open_round(a_spec("r2"))
        await store.open_round(a_spec("r1", url=URL))
        for first in range(0, 12_000, 3_000):
            await store.record("r1", first + 1, artifacts(*range(first, first + 3_000)), {})
            await store.record("r2", first + 1, artifacts(first), {})
        await store.close_round("r1")
        assert await _nonces(store, await store.plan(POLICY)) == list(range(12_000))


@pytest.mark.anyio
class TestTargets:
    async def test_sequence_numbers_rise_for_each_target_and_are_never_reused(
        self, store: SqliteOutbox
    ) -> None:
        for url in (URL, f"{URL}/", "http://b", f"{URL}//"):
            await store.enqueue("validated", url, {})
        seen = []
        while due := (await store.plan(POLICY)).due:
            for one in due:
                seen.append((one.url, one.sequence))
                await store.fail(one, "no", None)
        assert seen == [(URL, 1), ("http://b", 1), (URL, 2), (URL, 3)]

    async def test_busy_targets_and_missing_slots_wait(self, store: SqliteOutbox) -> None:
        for name in "abc":
            await store.enqueue("validated", f"http://{name}", {})
        plan = await store.plan(CallbackPolicy(max_concurrent=2), frozenset([URL]))
        assert [one.url for one in plan.due] == ["http://b"]
        assert plan.wait_s is None
        assert not plan.idle

    async def test_a_failed_delivery_does_not_block_others_to_its_target(
        self, store: SqliteOutbox, clock: HandClock
    ) -> None:
        await store.enqueue("validated", URL, {"job": 1})
        await store.enqueue("validated", URL, {"job": 2})
        (first,) = (await store.plan(POLICY)).due
        await store.fail(first, "no", 4.0)
        (second,) = (await store.plan(POLICY)).due
        assert await store.body(second) == b'{"job":2}'
        await store.acknowledge(second)
        assert (await store.plan(POLICY)).wait_s == 4.0
        clock.now += 4.0
        (again,) = (await store.plan(POLICY)).due
        assert (again.key, again.sequence, again.attempts) == (first.key, 1, 1)

    async def test_a_clock_that_is_set_back_does_not_stop_anything(
        self, store: SqliteOutbox, clock: HandClock
    ) -> None:
        await store.open_round(a_spec(url=URL))
        await store.record("r1", 1, artifacts(3), {})
        await store.enqueue("validated", "http://b", {})
        clock.now -= 3600.0
        assert len((await store.plan(POLICY)).due) == 2
        assert (await store.gauges()).oldest_pending_s == 0.0


# 1 stands for a value, 0 for a failure; each list is one record call.
@given(
    calls=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=8),
    most=st.integers(1, 5),
)
@settings(max_examples=25, deadline=None)
def test_deliveries_hold_every_value_once_in_order(calls: list[list[int]], most: int) -> None:
    asyncio.run(_deliver_all(calls, most))


async def _deliver_all(calls: list[list[int]], most: int) -> None:
    policy = CallbackPolicy(max_artifacts=most)
    bodies: list[list[int]] = []
    values: list[int] = []
    nonce = 0
    with tempfile.TemporaryDirectory() as folder:
        async with await SqliteOutbox.open(Path(folder) / "outbox.sqlite") as store:
            await store.open_round(a_spec(url=URL))
            for call in calls:
                done = [nonce + i for i, good in enumerate(call) if good]
                failed = {nonce + i: "not finite" for i, good in enumerate(call) if not good}
                nonce += len(call)
                values += done
                await store.record("r1", nonce, artifacts(*done), failed)
            while not (plan := await store.plan(policy, flushing=True)).idle:
                bodies.append(await _nonces(store, plan))
                await store.acknowledge(plan.due[0])
    assert [one for body in bodies for one in body] == values
    assert all(1 <= len(body) <= most for body in bodies)


async def _nonces(store: SqliteOutbox, plan: SendPlan) -> list[int]:
    (only,) = plan.due
    return nonces_of(json.loads(await store.body(only)))
