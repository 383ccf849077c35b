import asyncio
import logging
import socket
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from proofserve.outbox.planning import CallbackPolicy, Delivery, SendPlan
from proofserve.outbox.sender import CallbackSender
from proofserve.outbox.store import SqliteOutbox
from proofserve.rounds.errors import OutboxUnavailable
from support.pace import until

from .support import Arrival, FastClock, Target, a_spec, artifacts, running_target, sending

pytestmark = pytest.mark.anyio

# Seconds of the fast clock, except timeout_s: a hundred of them take one.
POLICY = CallbackPolicy()


def a_sender(
    store: SqliteOutbox, clock: FastClock, policy: CallbackPolicy = POLICY
) -> CallbackSender:
    return CallbackSender(store, policy, clock.sleep)


async def test_a_target_that_refuses_for_a_minute_gets_everything_once_in_order(
    store: SqliteOutbox, clock: FastClock, target: Target
) -> None:
    # The sixth attempt comes a minute after the first.
    target.answer = lambda _arrival: 503 if len(target.arrivals) <= 6 else 200
    await store.open_round(a_spec(url=target.url))
    sender = a_sender(store, clock)
    async with sending(sender):
        for nonce in range(20):
            await store.record("r1", nonce + 1, artifacts(nonce), {})
            await clock.sleep(4.0)
        await until(lambda: bool(target.accepted))
        await store.close_round("r1")
        assert await sender.drain(5.0)
    assert target.nonces() == list(range(20))
    _check_once_and_rising(target)
    first = [one.at for one in target.arrivals if one.key == target.arrivals[0].key]
    pauses = [later - earlier for earlier, later in pairwise(first)]
    for pause, planned in zip(pauses, (1, 2, 4, 8, 16, 30), strict=True):
        # A busy machine may send late by some real seconds, but never early.
        assert planned <= pause < planned + 500.0
    gauges = await store.gauges()
    assert (gauges.pending, gauges.expired) == (0, 0)
    assert gauges.delivered == len(target.accepted)


def _check_once_and_rising(target: Target) -> None:
    keys = [one.key for one in target.accepted]
    assert len(set(keys)) == len(keys)
    assert [one.sequence for one in target.accepted] == list(range(1, len(keys) + 1))


async def test_a_round_is_sent_once_per_interval(
    store: SqliteOutbox, clock: FastClock, target: Target
) -> None:
    await store.open_round(a_spec(url=target.url))
    started = clock()
    async with sending(a_sender(store, clock)):
        for nonce in range(15):
            await store.record("r1", nonce + 1, artifacts(nonce), {})
            await clock.sleep(1.0)
        await until(lambda: len(target.accepted) >= 2)
    for number, one in enumerate(target.accepted, 1):
        assert one.at - started >= 5.0 * number
    assert target.nonces() == list(range(len(target.nonces())))


async def test_closing_a_round_sends_at_once(store: SqliteOutbox, target: Target) -> None:
    await store.open_round(a_spec(url=target.url))
    async with sending(CallbackSender(store, CallbackPolicy(interval_s=3600.0))):
        await store.record("r1", 1, artifacts(3), {})
        await asyncio.sleep(0.05)
        assert target.arrivals == []
        await store.close_round("r1")
        await until(lambda: target.nonces() == [3])


async def test_refused_connections_are_tried_again(store: SqliteOutbox, clock: FastClock) -> None:
    # Bound, so that no other process takes its port, and refusing until it listens.
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await store.enqueue("validated", url, {"n": 1})
    async with sending(a_sender(store, clock)):
        assert (await _failure(store)).startswith("ConnectError: ")
        listener.listen()
        with running_target(clock, listener) as target:
            await until(lambda: len(target.accepted) == 1)


async def test_a_target_that_answers_too_late_gets_the_callback_again_with_the_same_key(
    store: SqliteOutbox, clock: FastClock, target: Target
) -> None:
    let_go = threading.Event()
    target.answer = lambda _arrival: 200 if let_go.wait(30.0) else 500
    await store.enqueue("validated", target.url, {})
    async with sending(a_sender(store, clock, CallbackPolicy(timeout_s=0.3))):
        assert await _failure(store) == "no answer within 0.3 s"
        let_go.set()
        await until(lambda: len(target.arrivals) >= 2)
        async with asyncio.timeout(20):
            while (await store.gauges()).delivered == 0:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
    assert len({one.key for one in target.arrivals}) == 1


async def _failure(store: SqliteOutbox) -> str:
    """Wait for the first failure; return the gauges."""
    async with asyncio.timeout(10):
        while True:
            error = (await store.gauges()).last_error
            if error:
                return error
            await asyncio.sleep(0.005)


async def test_an_expiry_is_logged_keeps_the_rows_and_the_round_continues(
    store: SqliteOutbox, clock: FastClock, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    target.answer = lambda arrival: 500 if arrival.sequence == 1 else 200
    await store.open_round(a_spec(url=target.url))
    sender = a_sender(store, clock, CallbackPolicy(max_retries=3))
    with caplog.at_level(logging.INFO, "proofserve.outbox.sender"):
        async with sending(sender):
            await store.record("r1", 2, artifacts(3, 7), {})
            await until(lambda: len(target.arrivals) == 3)
            await store.record("r1", 3, artifacts(11), {})
            assert await sender.drain(5.0)
    gauges = await store.gauges()
    assert (gauges.pending, gauges.delivered, gauges.expired) == (0, 1, 1)
    assert gauges.last_error == "HTTP 500: so says the target"
    assert [row.nonce for row in await store.results(0, 10)] == [3, 7, 11]
    assert target.nonces() == [11]
    assert [one.sequence for one in target.arrivals] == [1, 1, 1, 2]
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "round r1, sequence 1 expired after 3 attempts" in warning.getMessage()
    assert vars(warning)["round_id"] == "r1"


async def test_a_password_in_a_url_is_not_logged(
    store: SqliteOutbox, clock: FastClock, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    target.answer = lambda _arrival: 500
    url = target.url.replace("http://", "http://user:s3cret@")
    await store.enqueue("validated", url, {})
    with caplog.at_level(logging.INFO, "proofserve.outbox.sender"):
        async with sending(a_sender(store, clock, CallbackPolicy(max_retries=1))):
            await until(lambda: caplog.records)
    (record,) = caplog.records
    assert f"callback to {target.url}/validated, sequence 1 expired" in record.getMessage()
    assert "s3cret" not in record.getMessage()


async def test_a_slow_target_delays_no_other_target(
    store: SqliteOutbox, clock: FastClock, target: Target
) -> None:
    let_go = threading.Event()
    target.answer = lambda _arrival: 200 if let_go.wait(30.0) else 500
    with running_target(clock) as quick:
        for n in range(5):
            await store.enqueue("validated", target.url, {"n": n})
            await store.enqueue("validated", quick.url, {"n": n})
        async with sending(a_sender(store, clock, CallbackPolicy(max_concurrent=2))):
            try:
                await until(lambda: len(quick.accepted) == 5)
                assert len(target.arrivals) == 1
                assert target.accepted == []
            finally:
                let_go.set()


async def test_the_number_of_parallel_posts_is_limited(
    store: SqliteOutbox, clock: FastClock
) -> None:
    running = highest = 0
    with ExitStack() as stack:
        several = [stack.enter_context(running_target(clock)) for _ in range(3)]

        def enter(_arrival: Arrival) -> int:
            nonlocal running, highest
            running += 1
            highest = max(highest, running)
            time.sleep(0.02)
            running -= 1
            return 200

        for one in several:
            one.answer = enter
            for n in range(3):
                await store.enqueue("validated", one.url, {"n": n})
        sender = a_sender(store, clock, CallbackPolicy(max_concurrent=1))
        async with sending(sender):
            assert await sender.drain(5.0)
        assert [len(one.accepted) for one in several] == [3, 3, 3]
    assert highest == 1


async def test_a_restart_continues_with_the_undelivered_callbacks(
    path: Path, clock: FastClock, target: Target
) -> None:
    target.answer = lambda _arrival: 503
    async with await SqliteOutbox.open(path, clock) as store:
        await store.open_round(a_spec(url=target.url))
        await store.record("r1", 1, artifacts(3), {})
        async with sending(a_sender(store, clock)):
            await until(lambda: len(target.arrivals) >= 2)
        await store.record("r1", 2, artifacts(7), {})
    # The target may still be reading an attempt of the sender that ended.
    refused = 0
    while refused < len(target.arrivals):
        refused = len(target.arrivals)
        await asyncio.sleep(0.2)
    target.answer = lambda _arrival: 200
    async with await SqliteOutbox.open(path, clock) as store:
        sender = a_sender(store, clock)
        async with sending(sender):
            # The round was never closed, as after a crash: its interval still ends.
            await until(lambda: target.nonces() == [3, 7])
            assert await sender.drain(5.0)
        gauges = await store.gauges()
    assert len({one.key for one in target.arrivals[: refused + 1]}) == 1
    assert [one.sequence for one in target.accepted] == [1, 2]
    assert (gauges.pending, gauges.delivered) == (0, 2)


async def test_a_crash_before_the_acknowledgement_sends_again_with_the_same_key(
    path: Path, clock: FastClock, target: Target
) -> None:
    let_go = threading.Event()
    target.answer = lambda _arrival: 200 if let_go.wait(30.0) else 500
    async with await SqliteOutbox.open(path, clock) as store:
        await store.enqueue("generated", target.url, {"artifacts": [{"nonce": 3}]})
        async with sending(a_sender(store, clock)):
            await until(lambda: len(target.arrivals) == 1)
    let_go.set()
    await until(lambda: len(target.accepted) == 1)
    async with await SqliteOutbox.open(path, clock) as store:
        sender = a_sender(store, clock)
        async with sending(sender):
            assert await sender.drain(5.0)
    before, again = target.accepted
    assert (before.key, before.body) == (again.key, again.body)


async def test_drain_flushes_open_rounds_and_gives_up_in_time(
    store: SqliteOutbox, clock: FastClock, target: Target
) -> None:
    await store.open_round(a_spec(url=target.url))
    await store.record("r1", 2, artifacts(3, 7), {})
    sender = a_sender(store, clock, CallbackPolicy(interval_s=1e6, max_artifacts=1))
    async with sending(sender):
        assert await sender.drain(5.0)
        assert target.nonces() == [3, 7]
        assert await sender.drain(5.0)
        target.answer = lambda _arrival: 503
        await store.enqueue("validated", target.url, {})
        assert not await sender.drain(0.05)
    assert (await store.gauges()).pending == 1


class SlowPlans(SqliteOutbox):
    """Returns its plans late, after the outbox may have changed."""

    async def plan(
        self, policy: CallbackPolicy, busy: frozenset[str] = frozenset(), flushing: bool = False
    ) -> SendPlan:
        plan = await super().plan(policy, busy, flushing)
        await asyncio.sleep(0.1)
        return plan


async def test_drain_does_not_use_an_outdated_plan(path: Path, target: Target) -> None:
    async with await SlowPlans.open(path) as store:
        sender = CallbackSender(store, POLICY)
        async with sending(sender):
            await asyncio.sleep(0.05)
            await store.enqueue("validated", target.url, {})
            assert await sender.drain(5.0)
            assert len(target.accepted) == 1


class ForgetfulOutbox(SqliteOutbox):
    """Fails to store the first acknowledgements, like a disk that is full for a while."""

    refusals = 3

    async def acknowledge(self, delivery: Delivery) -> None:
        self.refusals -= 1
        if self.refusals >= 0:
            raise OutboxUnavailable("disk is full")
        await super().acknowledge(delivery)


async def test_a_full_disk_at_the_acknowledgement_does_not_post_again(
    path: Path, clock: FastClock, target: Target
) -> None:
    async with await ForgetfulOutbox.open(path, clock) as store:
        await store.enqueue("validated", target.url, {})
        sender = a_sender(store, clock)
        async with sending(sender):
            assert await sender.drain(5.0)
        assert len(target.arrivals) == 1
        assert (await store.gauges()).delivered == 1
