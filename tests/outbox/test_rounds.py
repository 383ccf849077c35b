"""The open round, and the order that a restart reads from the outbox."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from proofserve.outbox.planning import CallbackPolicy
from proofserve.outbox.store import SqliteOutbox
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import scheme
from proofserve.rounds.records import RoundProgress, RoundSpec, Target, Workload

from .support import a_distance_spec, a_spec, artifacts, nonces_of, progress_of, winners

pytestmark = pytest.mark.anyio

LANE = NonceLane(2, 5, 1, 3)
SPECS = [
    a_spec(),
    RoundSpec(
        "artifact",
        Workload(
            scheme("artifact-v1-layers", k_dim=24, stronger_rng=True),
            Block("b", 2**31),
            "kéy",
            1024,
        ),
        LANE,
        64,
        "http://a/base",
    ),
    a_distance_spec(),
    RoundSpec(
        "distance",
        Workload(scheme("distance-v1", sign_flips=False, layer_hooks=True), Block("b", 0), "k", 16),
        LANE,
        3,
        "http://a/base",
        # Two numbers without a short decimal form.
        Target(1.4142135623730951, 1 / 3),
    ),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.round_id)
async def test_a_restart_reads_the_order_of_the_open_round(path: Path, spec: RoundSpec) -> None:
    async with await SqliteOutbox.open(path) as store:
        assert await store.interrupted() is None
        await store.open_round(spec)
    async with await SqliteOutbox.open(path) as store:
        assert await store.interrupted() == spec
        assert await store.open_round(spec) == RoundProgress()
        await store.close_round(spec.round_id)
        assert await store.interrupted() is None
    async with await SqliteOutbox.open(path) as store:
        assert await store.interrupted() is None


async def test_a_second_round_closes_the_first_and_makes_its_results_due(
    store: SqliteOutbox,
) -> None:
    await store.open_round(a_spec(url="http://a"))
    await store.record("r1", 1, artifacts(3), {})
    assert (await store.plan(CallbackPolicy())).due == ()
    store.news.clear()
    await store.open_round(a_distance_spec())
    assert store.news.is_set()
    assert await store.interrupted() == a_distance_spec()
    (due,) = (await store.plan(CallbackPolicy())).due
    assert nonces_of(json.loads(await store.body(due))) == [3]


async def test_a_refused_order_leaves_the_open_round_open(store: SqliteOutbox) -> None:
    spec = a_distance_spec()
    await store.open_round(spec)
    await store.open_round(a_spec())
    for changed in (
        replace(spec, target=None),
        replace(spec, target=Target(1.3)),
        replace(spec, target=Target(1.4, 0.5)),
        replace(spec, work=replace(spec.work, scheme=scheme("distance-v1", layer_hooks=True))),
    ):
        with pytest.raises(ValueError, match="'d1' exists with other parameters"):
            await store.open_round(changed)
    with pytest.raises(ValueError, match="'judge' has no nonces to generate"):
        await store.open_round(replace(spec, round_id="judge", lane=None))
    assert await store.interrupted() == a_spec()


async def test_progress_counts_results_and_failures_of_its_own_round(store: SqliteOutbox) -> None:
    await store.open_round(a_spec())
    await store.record("r1", 8, artifacts(3, 7, 11), {15: "not finite"})
    assert await store.open_round(a_distance_spec()) == RoundProgress()
    await store.record("d1", 32, winners(3), {7: "not finite", 11: "not finite"})
    await store.record("d1", 64, [], {})
    assert await progress_of(store, "d1") == RoundProgress(64, found=1, failed=2)
    assert await store.open_round(a_spec()) == RoundProgress(8, found=3, failed=1)
    assert await store.open_round(a_distance_spec()) == RoundProgress(64, found=1, failed=2)
