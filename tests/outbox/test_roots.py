"""Rounds that publish the roots of their batches: rows, callbacks, deletion, and openings."""

import asyncio
import base64
import json
import os
import signal
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proofserve.outbox.planning import CallbackPolicy
from proofserve.outbox.pruning import Pruned
from proofserve.outbox.store import SqliteOutbox
from proofserve.protocol.codec import encode
from proofserve.protocol.commitments import leaf, opens, root
from proofserve.protocol.identity import Block
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.errors import Refusal
from proofserve.rounds.records import RoundProgress, RoundSpec
from proofserve.wire.records import CommittedRoots
from support.refusals import refused

from .support import FastClock, a_spec, artifacts, progress_of

pytestmark = pytest.mark.anyio

URL = "http://a"
AT_ONCE = CallbackPolicy(interval_s=0.0)
SIZE = 4
DAY = 86_400.0


def roots_spec(round_id: str = "c1", batch_size: int = SIZE, **changes: Any) -> RoundSpec:
    spec = replace(a_spec(round_id, url=URL), batch_size=batch_size, commits_roots=True)
    return replace(spec, **changes)


def vectors(nonces: Sequence[int]) -> list[Claim]:
    rows = np.array([[nonce % 97 / 97] * 12 for nonce in nonces], np.float32)
    return [Claim(n, text) for n, text in zip(nonces, encode(rows), strict=True)]


def lane(first: int, last: int, spec: RoundSpec | None = None) -> tuple[int, ...]:
    numbers = (spec or roots_spec()).lane
    assert numbers is not None
    return numbers.batch(first, last - first)


def root_of(found: Sequence[Claim]) -> bytes:
    return root([leaf(each.nonce, base64.b64decode(each.vector_b64)) for each in found])


async def due(store: SqliteOutbox, policy: CallbackPolicy = AT_ONCE) -> dict[str, Any]:
    """The body of the one callback that is due, which is acknowledged."""
    (one,) = (await store.plan(policy, flushing=True)).due
    body: dict[str, Any] = json.loads(await store.body(one))
    await store.acknowledge(one)
    return body


async def test_a_callback_has_the_roots_of_all_batches_and_no_vector(store: SqliteOutbox) -> None:
    await store.open_round(roots_spec())
    found = vectors(lane(0, 12))
    await store.record("c1", 8, found[:8], {})
    await store.record("c1", 12, found[8:], {})
    body = await due(store)
    assert "artifacts" not in body
    known = CommittedRoots.model_validate(body)
    assert (known.block_hash, known.block_height, known.public_key) == ("b10c", 77, "k3y")
    assert (known.round_id, known.lane) == ("c1", roots_spec().lane)
    assert (known.scheme, known.encoding.k_dim, known.params.seq_len) == ("artifact-v1", 12, 256)
    tops = [root_of(found[start : start + SIZE]) for start in (0, 4, 8)]
    assert [each.root for each in known.roots] == tops
    assert [each.previous_root for each in known.roots] == [None, *tops[:2]]
    assert [(each.first_index, each.count) for each in known.roots] == [(0, 4), (4, 4), (8, 4)]


async def test_a_failed_nonce_keeps_its_place_as_an_empty_leaf(store: SqliteOutbox) -> None:
    await store.open_round(roots_spec())
    nonces = lane(0, 8)
    found = vectors(nonces)
    await store.record("c1", 8, found[:2], dict.fromkeys(nonces[2:], "not finite"))
    tops = [root_of([*found[:2], *(Claim(n, "") for n in nonces[2:4])])]
    tops += [root_of([Claim(n, "") for n in nonces[4:]])]
    # The second batch has no vector at all, and its root is published all the same.
    roots = CommittedRoots.model_validate(await due(store)).roots
    assert [each.root for each in roots] == tops
    (opened,) = await store.openings(await store.committed_round("b10c", "k3y", None), nonces[5:6])
    assert (opened.vector_b64, opened.index) == ("", 5)
    assert opens(tops[1], 4, 1, leaf(opened.nonce, b""), opened.path)


async def test_a_repeated_call_adds_no_batch(store: SqliteOutbox) -> None:
    await store.open_round(roots_spec())
    found = vectors(lane(0, 8))
    for _ in range(2):
        await store.record("c1", 8, found, {})
    await store.record("c1", 4, found[:4], {})
    assert len((await due(store))["roots"]) == 2
    assert await progress_of(store, "c1") == RoundProgress(8, found=8)


async def test_a_batch_without_all_results_is_not_stored(store: SqliteOutbox) -> None:
    await store.open_round(roots_spec())
    with pytest.raises(ValueError, match="the batch at lane index 4 lacks results"):
        await store.record("c1", 8, vectors(lane(0, 7)), {})
    assert await store.results(0, 10) == []
    assert await progress_of(store, "c1") == RoundProgress()


async def test_callbacks_hold_whole_batches_and_each_root_once(store: SqliteOutbox) -> None:
    await store.open_round(roots_spec())
    await store.record("c1", 20, vectors(lane(0, 20)), {})
    # A limit of two: two roots, where a round of vectors would have two artifacts.
    policy = CallbackPolicy(interval_s=0.0, max_artifacts=2)
    bodies = [await due(store, policy) for _ in range(3)]
    firsts = [[each["first_index"] for each in body["roots"]] for body in bodies]
    assert firsts == [[0, 4], [8, 12], [16]]
    assert (await store.plan(policy, flushing=True)).idle


@pytest.mark.parametrize(("size", "batches", "most"), [(32, 4, 8.0), (1024, 3, 0.3)])
async def test_a_nonce_takes_few_bytes(
    store: SqliteOutbox, size: int, batches: int, most: float
) -> None:
    """With hashes and keys as long as a network's, and the batches of some seconds."""
    work = replace(roots_spec().work, block=Block("b" * 64, 1_234_567), public_key="k" * 44)
    round_id = str(uuid.uuid4())
    await store.open_round(roots_spec(round_id, size, work=work))
    found = vectors(lane(0, size * batches))
    await store.record(round_id, size * batches, found, {})
    (one,) = (await store.plan(AT_ONCE, flushing=True)).due
    body = await store.body(one)
    assert len(json.loads(body)["roots"]) == batches
    assert len(body) / len(found) <= most


async def test_the_chain_goes_on_after_a_restart(path: Path, clock: FastClock) -> None:
    found = vectors(lane(0, 8))
    async with await SqliteOutbox.open(path, clock) as store:
        await store.open_round(roots_spec())
        await store.record("c1", 4, found[:4], {})
        first = await due(store)
    async with await SqliteOutbox.open(path, clock) as store:
        assert await store.interrupted() == roots_spec()
        assert await store.open_round(roots_spec()) == RoundProgress(4, found=4)
        await store.record("c1", 8, found[4:], {})
        second = await due(store)
    assert second["roots"][0]["previous_root"] == first["roots"][0]["root"]
    assert second["roots"][0]["first_index"] == 4


async def test_every_nonce_opens_under_the_root_that_was_posted(store: SqliteOutbox) -> None:
    spec = roots_spec(batch_size=5)
    await store.open_round(spec)
    nonces = lane(0, 13)
    found = vectors(nonces)
    await store.record("c1", 10, found[:10], {})
    await store.record("c1", 13, found[10:], {})
    roots = {r.first_index: r for r in CommittedRoots.model_validate(await due(store)).roots}
    assert [each.count for each in roots.values()] == [5, 5, 3]
    committed = await store.committed_round("b10c", "k3y", "c1")
    assert (committed.next_index, committed.lane) == (13, spec.lane)
    asked = [*reversed(nonces), nonces[3]]
    opened = await store.openings(committed, asked)
    assert [each.nonce for each in opened] == asked
    for each in opened:
        posted = roots[each.batch.first_index]
        vector = base64.b64decode(each.vector_b64)
        place = each.index - each.batch.first_index
        assert opens(posted.root, posted.count, place, leaf(each.nonce, vector), each.path)


async def test_what_cannot_be_opened_is_named(store: SqliteOutbox) -> None:
    await store.open_round(roots_spec("c1"))
    await store.record("c1", 4, vectors(lane(0, 4)), {})
    committed = await store.committed_round("b10c", "k3y", None)
    later = lane(4, 5)[0]
    for unknown in (later, 0, 4):
        with refused(
            Refusal.UNKNOWN_NONCE, match=f"nonce {unknown} is in no batch of round c1 yet"
        ):
            await store.openings(committed, [*lane(0, 2), unknown])
    with refused(Refusal.UNKNOWN_ROUND, match="no round of block b10c, key other"):
        await store.committed_round("b10c", "other", None)
    with refused(Refusal.UNKNOWN_ROUND, match="id c9"):
        await store.committed_round("b10c", "k3y", "c9")
    await store.open_round(roots_spec("c2"))
    with refused(Refusal.SEVERAL_ROUNDS, match="give round_id: c1, c2"):
        await store.committed_round("b10c", "k3y", None)
    assert (await store.committed_round("b10c", "k3y", "c1")).next_index == 4


async def test_a_round_of_vectors_has_nothing_to_open(store: SqliteOutbox) -> None:
    await store.open_round(a_spec("r1", URL))
    await store.record("r1", 4, artifacts(3, 7, 11, 15), {})
    with refused(Refusal.NOT_COMMITTED, match="publishes vectors, not roots"):
        await store.committed_round("b10c", "k3y", None)
    assert "roots" not in await due(store)


class SetClock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


async def test_vectors_stay_until_some_days_after_their_root_was_delivered(path: Path) -> None:
    clock = SetClock()
    async with await SqliteOutbox.open(path, clock) as store:
        await store.open_round(roots_spec())
        await store.record("c1", 4, vectors(lane(0, 4)), {})
        committed = await store.committed_round("b10c", "k3y", None)
        clock.now += 100 * DAY
        assert await store.prune(DAY) == Pruned(0, 0, 0)
        first = (await due(store))["roots"][0]
        clock.now += 0.9 * DAY
        assert await store.prune(DAY) == Pruned(0, 0, 0)
        assert len(await store.openings(committed, lane(0, 4))) == 4
        clock.now += 0.2 * DAY
        assert await store.prune(DAY) == Pruned(results=4, callbacks=1, rounds=0)
        with refused(Refusal.VECTORS_DELETED, match=f"of the batch of nonce {lane(2, 3)[0]} are"):
            await store.openings(committed, lane(2, 3))
        # The chain goes on from the root of the deleted vectors.
        await store.record("c1", 8, vectors(lane(4, 8)), {})
        assert (await due(store))["roots"][0]["previous_root"] == first["root"]
        await store.close_round("c1")
        await store.open_round(a_spec("r2"))
        clock.now += 2 * DAY
        assert await store.prune(DAY) == Pruned(results=4, callbacks=1, rounds=1)
        with refused(Refusal.UNKNOWN_ROUND):
            await store.openings(committed, lane(0, 1))
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT count(*) FROM batches").fetchone() == (0,)


def test_sigkill_leaves_no_vector_without_its_root(path: Path) -> None:
    writer = Path(__file__).with_name("writer.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(writer), str(path), "roots"]
    for calls in (20, 15):
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            reported = [int(child.stdout.readline()) for _ in range(calls)][-1]
            child.send_signal(signal.SIGKILL)
            child.stdout.read()
            assert child.wait() == -signal.SIGKILL
    asyncio.run(_check_after_kill(path, reported))


async def _check_after_kill(path: Path, reported: int) -> None:
    async with await SqliteOutbox.open(path) as store:
        committed = await store.committed_round("block", "key", None)
        assert committed.next_index >= reported > 0
        nonces = committed.lane.batch(0, committed.next_index)
        assert [row.nonce for row in await store.results(0, 10**9)] == list(nonces)
        opened = await store.openings(committed, nonces)
        roots = CommittedRoots.model_validate(await due(store)).roots
    assert [root.first_index for root in roots] == list(range(0, len(nonces), 32))
    previous = None
    for each in roots:
        assert each.previous_root == previous
        previous = each.root
    tops = {each.first_index: each for each in roots}
    for one in opened:
        batch = tops[one.batch.first_index]
        hashed = leaf(one.nonce, base64.b64decode(one.vector_b64))
        assert opens(batch.root, batch.count, one.index - batch.first_index, hashed, one.path)
