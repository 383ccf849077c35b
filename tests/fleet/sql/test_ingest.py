import asyncio
import json

import numpy as np
import pytest

from proofserve.fleet.records import BatchKind, Lane, MemberFindings
from proofserve.fleet.sql.store import FleetStore
from proofserve.protocol.errors import ProtocolError
from proofserve.rounds.errors import Refused
from proofserve.rounds.records import StoredResult
from proofserve.rounds.state import Move

from .support import (
    a_distance_spec,
    a_lane,
    a_spec,
    another_lane,
    artifacts_body,
    head_of,
    lanes_of,
    nonces_of,
    roots_body,
    send,
    texts_of,
    vectors_of,
    winners_of,
)

pytestmark = pytest.mark.anyio


async def nonces_in(store: FleetStore) -> list[int]:
    return [each.nonce for each in await store.results(0, 10_000)]


async def test_a_callback_is_stored_once(store: FleetStore) -> None:
    opened, lane = await a_lane(store)
    nonces = nonces_of(opened, lane, 0, 5)
    body = artifacts_body(opened.spec, nonces)
    assert await send(store, opened, lane, "k1", body) is True
    assert await send(store, opened, lane, "k1", body) is False
    texts = texts_of(nonces)
    assert await store.results(0, 100) == [
        StoredResult(seq, "r1", nonce, text)
        for seq, nonce, text in zip(range(1, 6), nonces, texts, strict=True)
    ]
    (progress,) = await lanes_of(store, "r1")
    assert (progress.batches, progress.stored) == (1, 5)
    assert progress.last_stored_at is not None
    assert (await store.gauges()).results == 5


async def test_a_nonce_of_another_lane_is_refused(store: FleetStore) -> None:
    opened, lane = await a_lane(store)
    other = await another_lane(store, opened, "m2")
    mixed = (*nonces_of(opened, lane, 0, 5), *nonces_of(opened, other, 7, 1))
    with pytest.raises(ProtocolError, match=rf"artifacts: nonce {mixed[-1]} is not of the member"):
        await send(store, opened, lane, "k1", artifacts_body(opened.spec, mixed))
    with pytest.raises(ProtocolError, match="is not of the member's lane"):
        await store.ingest(opened, lane, "k1", vectors_of(mixed))
    assert await nonces_in(store) == []
    assert await send(store, opened, other, "k1", artifacts_body(opened.spec, mixed[-1:]))


async def test_a_nonce_that_is_stored_does_not_count_again(store: FleetStore) -> None:
    opened, lane = await a_lane(store)
    for key, start, size in (("a", 0, 10), ("b", 20, 10), ("c", 5, 20), ("d", 0, 30), ("e", 28, 4)):
        assert await store.ingest(
            opened, lane, key, vectors_of(nonces_of(opened, lane, start, size))
        )
    assert sorted(await nonces_in(store)) == list(nonces_of(opened, lane, 0, 32))
    (progress,) = await lanes_of(store, "r1")
    assert (progress.batches, progress.stored) == (5, 32)
    assert [each.seq for each in await store.results(0, 100)] == list(range(1, 33))


async def test_repeats_within_one_transaction_do_not_count(store: FleetStore) -> None:
    """Callbacks that come at once share a transaction, also the same one and overlapping ones."""
    opened, lane = await a_lane(store)
    other = await another_lane(store, opened, "m2")
    calls = [
        store.ingest(opened, of, key, vectors_of(nonces_of(opened, of, start, 10)))
        for of in (lane, other)
        for key, start in (("a", 0), ("a", 0), ("b", 5), ("c", 100), ("d", 95))
    ]
    fresh = await asyncio.gather(*calls)
    assert sorted(fresh) == [False] * 2 + [True] * 8
    expected = {
        nonce
        for of in (lane, other)
        for start in (0, 5, 95, 100)
        for nonce in nonces_of(opened, of, start, 10)
    }
    found = await nonces_in(store)
    assert len(found) == len(expected) == 60
    assert set(found) == expected


async def test_late_callbacks_of_ended_lanes_are_stored(store: FleetStore) -> None:
    opened, lane = await a_lane(store)
    await store.note_lanes({}, {lane: "lost"})
    await store.move(Move.STOP)
    await store.remove_member(lane.member_id)
    assert await store.ingest(opened, lane, "k", vectors_of(nonces_of(opened, lane, 3, 2)))
    assert len(await nonces_in(store)) == 2


async def test_a_lane_that_was_never_given_is_named(store: FleetStore) -> None:
    opened, lane = await a_lane(store)
    never = Lane("r1", 5, lane.member_id, 0.0)
    good = store.ingest(opened, lane, "k", vectors_of(nonces_of(opened, lane, 0, 2)))
    bad = store.ingest(opened, never, "k", vectors_of(nonces_of(opened, never, 0, 2)))
    stored, refused = await asyncio.gather(good, bad, return_exceptions=True)
    assert stored is True
    assert isinstance(refused, Refused)


@pytest.mark.parametrize("key", ["", "x" * 201, "a\0b", "\xe9"])
async def test_a_key_that_cannot_be_kept_is_refused(store: FleetStore, key: str) -> None:
    opened, lane = await a_lane(store)
    with pytest.raises(ProtocolError, match="Idempotency-Key"):
        await store.ingest(opened, lane, key, vectors_of(nonces_of(opened, lane, 0, 1)))


async def test_winners_keep_all_digits(store: FleetStore) -> None:
    opened, lane = await a_lane(store, a_distance_spec())
    found = winners_of(nonces_of(opened, lane, 0, 6))
    body = {
        **head_of(opened.spec),
        "r_target": 1.4,
        "nonces": found.nonces.tolist(),
        "dist": found.values[:, 0].tolist(),
    }
    assert await send(store, opened, lane, "k1", body)
    await store.ingest(opened, lane, "k2", winners_of(nonces_of(opened, lane, 6, 3)))
    distances = [each.distance for each in await store.results(0, 6)]
    assert distances == found.values[:, 0].tolist()
    newest = await store.winners("d1", 4)
    assert [each.nonce for each in newest] == list(nonces_of(opened, lane, 5, 4))
    assert newest[0].distance == found.values[5, 0]
    assert await store.winners("d1", 0) == []
    assert await store.winners("other", 5) == []


async def test_roots_count_the_nonces_under_them(store: FleetStore) -> None:
    opened, lane = await a_lane(store, a_spec(roots=True))
    assert await send(store, opened, lane, "k1", roots_body(opened, lane, 0, [32, 32]))
    assert await send(store, opened, lane, "k2", roots_body(opened, lane, 32, [32, 20]))
    (progress,) = await lanes_of(store, "r1")
    assert (progress.batches, progress.stored) == (2, 84)
    assert await store.results(0, 10) == []


async def test_an_empty_callback_is_remembered(store: FleetStore) -> None:
    opened, lane = await a_lane(store)
    empty = MemberFindings(BatchKind.VECTORS, np.empty(0, np.int64), np.empty((0, 12), "<f2"))
    assert await store.ingest(opened, lane, "k", empty)
    assert not await store.ingest(opened, lane, "k", empty)
    assert json.loads(json.dumps(await nonces_in(store))) == []
