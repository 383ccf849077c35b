"""An operator makes expired callbacks due again while the sender runs."""

import asyncio
from pathlib import Path

import pytest

from proofserve.outbox.offline import retry, writing
from proofserve.outbox.planning import CallbackPolicy
from proofserve.outbox.sender import CallbackSender
from proofserve.outbox.store import SqliteOutbox
from support.pace import until

from .support import FastClock, Target, a_spec, artifacts, sending

pytestmark = pytest.mark.anyio

# A callback expires after one failure.
POLICY = CallbackPolicy(max_retries=1)


def retry_expired(path: Path, clock: FastClock) -> None:
    with writing(path) as connection:
        retry(connection, clock(), expired=True)


async def test_the_sender_notices_callbacks_that_another_process_makes_due(
    path: Path, store: SqliteOutbox, clock: FastClock, target: Target
) -> None:
    target.answer = lambda _arrival: 500
    await store.open_round(a_spec(url=target.url))
    sender = CallbackSender(store, POLICY, clock.sleep)
    async with sending(sender):
        for nonce in (3, 7, 11):
            await store.record("r1", nonce, artifacts(nonce), {})
            assert await sender.drain(5.0)
        assert (await store.gauges()).expired == 3
        target.answer = lambda _arrival: 200
        await asyncio.to_thread(retry_expired, path, clock)
        # The sender gets no signal, and nothing else is due.
        await until(lambda: len(target.accepted) == 3)
        assert await sender.drain(5.0)
    assert target.nonces() == [3, 7, 11]
    keys = {one.sequence: one.key for one in target.arrivals[:3]}
    assert {one.sequence: one.key for one in target.accepted} == keys
    gauges = await store.gauges()
    assert (gauges.delivered, gauges.expired, gauges.revived) == (3, 0, 3)


async def test_a_revived_callback_does_not_delay_its_round(
    path: Path, store: SqliteOutbox, clock: FastClock, target: Target
) -> None:
    await store.open_round(a_spec(url=target.url))
    await store.record("r1", 1, artifacts(3), {})
    (given_up,) = (await store.plan(POLICY, flushing=True)).due
    await store.fail(given_up, "no", None)
    await store.record("r1", 2, artifacts(7), {})
    (waiting,) = (await store.plan(POLICY, flushing=True)).due
    # The round already has a waiting callback.
    await asyncio.to_thread(retry_expired, path, clock)
    await store.acknowledge(waiting)
    await store.record("r1", 3, artifacts(11), {})
    # The revived callback is due first and does not block the next one.
    (first,) = (await store.plan(POLICY, flushing=True)).due
    assert first.key == given_up.key
    await store.fail(first, "no", 1000.0)
    sender = CallbackSender(store, CallbackPolicy(backoff_longest_s=1e6), clock.sleep)
    async with sending(sender):
        assert not await sender.drain(5.0)
    assert target.nonces() == [11]
    gauges = await store.gauges()
    assert (gauges.pending, gauges.delivered, gauges.revived) == (1, 2, 1)
