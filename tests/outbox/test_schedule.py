import asyncio
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proofserve.outbox.planning import CallbackPolicy, SendPlan
from proofserve.outbox.store import SqliteOutbox

from .support import HandClock, a_spec, artifacts, nonces_of

URL = "http://a"
POLICY = CallbackPolicy()


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.mark.anyio
class TestRounds:
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
