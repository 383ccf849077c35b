import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from outbox.support import FastClock, Target, running_target, sending
from proofserve.fleet.sql.store import FleetStore
from proofserve.outbox.planning import CallbackPolicy
from proofserve.outbox.sender import CallbackSender
from proofserve.receiver.callbacks import Generated, GeneratedWinners
from proofserve.rounds.state import Move
from proofserve.wire.records import CommittedRoots
from support.pace import until

from .support import (
    a_distance_spec,
    a_lane,
    a_spec,
    another_lane,
    nonces_of,
    roots_body,
    send,
    texts_of,
    vectors_of,
    winners_of,
)

pytestmark = pytest.mark.anyio

POLICY = CallbackPolicy(timeout_s=100.0)


@pytest.fixture
def clock() -> FastClock:
    return FastClock()


@pytest.fixture
def target(clock: FastClock) -> Iterator[Target]:
    with running_target(clock) as started:
        yield started


@pytest.fixture
async def store(url: str, clock: FastClock) -> AsyncIterator[FleetStore]:
    async with await FleetStore.open(url, clock) as opened:
        yield opened


def a_sender(
    store: FleetStore, clock: FastClock, policy: CallbackPolicy = POLICY
) -> CallbackSender:
    return CallbackSender(store, policy, clock.sleep)


async def test_all_of_a_round_arrives_once_and_in_order(
    store: FleetStore, clock: FastClock, target: Target
) -> None:
    target.answer = lambda _arrival: 503
    opened, lane = await a_lane(store, a_spec(url=target.url))
    other = await another_lane(store, opened, "m2")
    sender = a_sender(store, clock)
    expected = []
    async with sending(sender):
        for step in range(20):
            if step == 15:
                await until(lambda: bool(target.arrivals))
                target.answer = lambda _arrival: 200
            of = (lane, other)[step % 2]
            nonces = nonces_of(opened, of, step * 3, 3)
            await store.ingest(opened, of, f"k{step}", vectors_of(nonces))
            expected += nonces
            await clock.sleep(4.0)
        # Draining gives up while a callback waits for its next attempt.
        await until(lambda: bool(target.accepted))
        await store.move(Move.STOP)
        assert await sender.drain(30.0)
    assert target.nonces() == expected
    sequences = [one.sequence for one in target.accepted]
    assert sequences == list(range(1, len(sequences) + 1))
    assert len({one.key for one in target.accepted}) == len(sequences)
    # While the target refused, everything that came went into one callback.
    assert len(sequences) < 20
    gauges = await store.gauges()
    assert (gauges.pending, gauges.expired, gauges.results) == (0, 0, 60)
    assert gauges.delivered == len(sequences)
    assert gauges.failed_attempts == len(target.arrivals) - len(target.accepted) > 0


async def test_a_body_is_that_of_a_node(
    store: FleetStore, clock: FastClock, target: Target
) -> None:
    opened, lane = await a_lane(store, a_spec(url=target.url + "/"))
    nonces = nonces_of(opened, lane, 0, 40)
    for start in range(0, 40, 2):
        found = vectors_of(nonces[start : start + 2])
        await store.ingest(opened, lane, f"k{start}", found)
    sender = a_sender(store, clock)
    async with sending(sender):
        assert await sender.drain(30.0)
    (one,) = target.accepted
    assert one.path == "/generated"
    body = Generated.model_validate(one.body)
    assert (body.public_key, body.block_hash, body.block_height, body.node_id) == (
        *("k3y", "b10c"),
        *(77, 3),
    )
    assert body.encoding.k_dim == 12
    assert [each.nonce for each in body.artifacts] == list(nonces)
    assert [each.vector_b64 for each in body.artifacts] == texts_of(nonces)


async def test_winners_and_roots_have_their_own_bodies(
    store: FleetStore, clock: FastClock, target: Target
) -> None:
    opened, lane = await a_lane(store, a_distance_spec(url=target.url))
    found = winners_of(nonces_of(opened, lane, 0, 5))
    await store.ingest(opened, lane, "k", found)
    sender = a_sender(store, clock)
    async with sending(sender):
        await until(lambda: len(target.accepted) == 1)
        await store.move(Move.STOP)
        opened, lane = await a_lane(store, a_spec(url=target.url, roots=True))
        bodies = [roots_body(opened, lane, start, [32, 32]) for start in (0, 64)]
        # The second repeats a root of the first, and only its other one goes on.
        repeats = roots_body(opened, lane, 96, [32, 32])
        for key, body in enumerate([*bodies, repeats]):
            assert await send(store, opened, lane, f"k{key}", body)
        assert await sender.drain(30.0)
    winners = GeneratedWinners.model_validate(target.accepted[0].body)
    assert (winners.nonces, winners.dist) == (found.nonces.tolist(), found.values[:, 0].tolist())
    assert winners.r_target == 1.4
    sent = [one.body for one in target.accepted[1:]]
    assert sent[:2] == bodies
    assert sent[2] == {**repeats, "roots": repeats["roots"][1:]}
    assert CommittedRoots.model_validate(sent[0]).lane == opened.nonces_of(lane.lane)


async def test_a_callback_whose_acknowledgement_was_lost_comes_again_under_its_key(
    url: str, store: FleetStore, clock: FastClock, target: Target
) -> None:
    opened, lane = await a_lane(store, a_spec(url=target.url))
    await store.ingest(opened, lane, "k", vectors_of(nonces_of(opened, lane, 0, 3)))
    target.delay_s = 1.0
    async with sending(a_sender(store, clock)):
        await until(lambda: len(target.arrivals) == 1)
    # The controller died before the answer; another one takes over.
    target.delay_s = 0.0
    async with await FleetStore.open(url, clock) as later:
        sender = a_sender(later, clock)
        async with sending(sender):
            assert await sender.drain(30.0)
        await later.ingest(opened, lane, "k2", vectors_of(nonces_of(opened, lane, 3, 3)))
        async with sending(sender):
            assert await sender.drain(30.0)
    first, again, next_ = target.arrivals
    assert (first.key, first.sequence, first.body) == (again.key, again.sequence, again.body)
    assert (again.sequence, next_.sequence) == (1, 2)


async def test_a_large_backlog_goes_out_in_parts(
    store: FleetStore, clock: FastClock, target: Target
) -> None:
    opened, lane = await a_lane(store, a_spec(url=target.url))
    for start in range(0, 50, 10):
        await store.ingest(
            opened, lane, f"k{start}", vectors_of(nonces_of(opened, lane, start, 10))
        )
    sender = a_sender(store, clock, replace(POLICY, max_artifacts=25))
    async with sending(sender):
        assert await sender.drain(30.0)
    assert target.nonces() == list(nonces_of(opened, lane, 0, 50))
    # Callbacks of members are never cut: 20 fit, 30 would not.
    assert [len(one.body["artifacts"]) for one in target.accepted] == [20, 20, 10]


async def test_a_later_callback_never_overtakes_an_earlier_one(
    store: FleetStore, clock: FastClock, target: Target
) -> None:
    target.answer = lambda _arrival: 200 if len(target.arrivals) > 3 else 500
    for number in range(5):
        await store.enqueue("validated", target.url, {"number": number})
    sender = a_sender(store, clock)
    async with sending(sender):
        await until(lambda: len(target.accepted) == 5)
    assert [one.body["number"] for one in target.accepted] == list(range(5))
    assert all(earlier.sequence <= later.sequence for earlier, later in pairwise(target.arrivals))


async def test_a_callback_that_expires_makes_way(
    store: FleetStore, clock: FastClock, target: Target
) -> None:
    target.answer = lambda arrival: 413 if arrival.body.get("number") == 0 else 200
    for number in range(2):
        await store.enqueue("validated", target.url, {"number": number})
    sender = a_sender(store, clock, replace(POLICY, max_retries=2))
    async with sending(sender):
        await until(lambda: len(target.accepted) == 1)
        assert await sender.drain(30.0)
    gauges = await store.gauges()
    assert (gauges.expired, gauges.pending) == (1, 0)
    assert gauges.last_error is not None
    assert gauges.last_error.startswith("HTTP 413")


async def test_two_stores_make_one_stream(
    url: str, store: FleetStore, clock: FastClock, target: Target
) -> None:
    """A controller that has just lost the lead may plan beside the next one: same keys."""
    opened, lane = await a_lane(store, a_spec(url=target.url))
    async with await FleetStore.open(url, clock) as other:
        for step in range(10):
            writer = (store, other)[step % 2]
            found = vectors_of(nonces_of(opened, lane, step * 3, 3))
            await writer.ingest(opened, lane, f"k{step}", found)
            plans = await asyncio.gather(
                *(each.plan(POLICY, flushing=True) for each in (store, other))
            )
            due = {delivery for plan in plans for delivery in plan.due}
            assert [delivery.sequence for delivery in due] == [step + 1]
            for delivery in due:
                await other.acknowledge(delivery)
                # A second acknowledgement, or a late failure, changes nothing.
                await store.fail(delivery, "late", None)
    gauges = await store.gauges()
    assert (gauges.delivered, gauges.expired, gauges.pending) == (10, 0, 0)
