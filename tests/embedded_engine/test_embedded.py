"""Proofs on a real engine that an application has embedded, with chat beside them."""

import asyncio

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from proofserve.engines.vllm.core_gate import CHAT_GRACE_S
from proofserve.protocol.scheme import Scheme
from proofserve.protocol.schemes import scheme
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import Deferred, ProofBatch
from proofserve.rounds.status import EngineGauges
from support.engines import SKETCH, EmbeddedEngine, workload
from support.pace import until

pytestmark = pytest.mark.engine


async def prove_for_ever(
    engine: EmbeddedEngine, done: list[int], made_by: Scheme | None = None
) -> None:
    """A round in its barest form: two calls in flight until cancelled."""
    async with engine.engine.session(workload(made_by=made_by)) as prove:

        async def one(start: int) -> None:
            outcome = await prove(range(start, start + 16))
            if isinstance(outcome, ProofBatch):
                done.extend(outcome.nonces)

        start = 0
        while True:
            await asyncio.gather(one(start), one(start + 16))
            start += 32


def test_vectors_are_finite_and_of_length_one(vectors: NDArray[np.float32]) -> None:
    assert vectors.shape == (32, 12)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


def test_another_key_gives_other_vectors(
    engine: EmbeddedEngine, vectors: NDArray[np.float32]
) -> None:
    other = engine.run(engine.prove(workload(key="other"), range(32))).values
    assert np.linalg.norm(other - vectors, axis=1).min() > 0.2


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(0, 31), min_size=1, max_size=32, unique=True))
def test_a_vector_does_not_depend_on_its_batch(
    engine: EmbeddedEngine, vectors: NDArray[np.float32], nonces: list[int]
) -> None:
    batch = engine.run(engine.prove(workload(), nonces))
    assert batch.nonces == tuple(nonces)
    np.testing.assert_array_equal(batch.values, vectors[nonces])


def test_a_sketch_does_not_depend_on_its_batch(
    engine: EmbeddedEngine, sketches: NDArray[np.float32]
) -> None:
    assert np.isfinite(sketches).all()
    work = workload(made_by=SKETCH)
    for nonces in ([5], [15, 0, 7], list(range(12, 3, -1))):
        part = engine.run(engine.prove(work, nonces)).values
        np.testing.assert_array_equal(part, sketches[nonces])


@pytest.mark.parametrize("layer_hooks", [False, True])
def test_a_distance_does_not_depend_on_its_batch(engine: EmbeddedEngine, layer_hooks: bool) -> None:
    work = workload(made_by=scheme("distance-v1", layer_hooks=layer_hooks))
    whole = engine.run(engine.prove(work, range(32))).values
    assert np.isfinite(whole).all()
    for nonces in ([5], [31, 0, 7], list(range(20, 9, -1))):
        part = engine.run(engine.prove(work, nonces)).values
        np.testing.assert_array_equal(part, whole[nonces])


def test_layer_reflections_move_the_vectors_and_leave_chat_alone(
    engine: EmbeddedEngine, vectors: NDArray[np.float32]
) -> None:
    before = engine.run(engine.chat(1))
    layers = workload(made_by=scheme("artifact-v1-layers", k_dim=12))
    values = engine.run(engine.prove(layers, range(32))).values
    # A reflection by one random direction moves a state of 256 dimensions by about 2/sqrt(256).
    assert np.linalg.norm(values - vectors, axis=1).min() > 0.05
    assert engine.run(engine.chat(1)) == before
    again = engine.run(engine.prove(workload(), range(32))).values
    np.testing.assert_array_equal(again, vectors)


@pytest.mark.parametrize("made_by", [None, SKETCH], ids=["artifact", "sketch"])
def test_chat_is_identical_while_proofs_run(engine: EmbeddedEngine, made_by: Scheme | None) -> None:
    async def scenario() -> None:
        without = [await engine.chat(i) for i in range(12)]
        done: list[int] = []
        proofs = asyncio.create_task(prove_for_ever(engine, done, made_by))
        await until(lambda: _true(len(done) > 0))
        assert [await engine.chat(i) for i in range(12)] == without
        before = len(done)
        await until(lambda: _true(len(done) > before))
        await _cancel(proofs)

    engine.run(scenario())


def test_proofs_yield_to_continuous_chat_and_come_back(engine: EmbeddedEngine) -> None:
    async def scenario() -> tuple[int, EngineGauges]:
        done: list[int] = []
        chats = [asyncio.create_task(engine.chat(i, tokens=150)) for i in range(24)]
        await until(lambda: _busy(engine))
        proofs = asyncio.create_task(prove_for_ever(engine, done))
        await asyncio.gather(*chats)
        during = len(done)
        await until(lambda: _true(len(done) > during))
        await _cancel(proofs)
        return during, await engine.engine.gauges()

    during, gauges = engine.run(scenario())
    assert during <= 32  # at most what finished between the last chat token and the count
    assert gauges.deferred_s > 0
    assert gauges.longest_chat_wait_batches <= 1.05
    # Not before chat has been quiet for the grace, and long before the next wakeup of the loop;
    # how long exactly, `proofserve bench chat-priority` measures.
    assert min(gauges.resume_ms) >= CHAT_GRACE_S * 1e3
    assert np.median(gauges.resume_ms) <= 100


def test_a_deferral_ends_and_says_so(engine: EmbeddedEngine) -> None:
    async def scenario() -> object:
        chats = [asyncio.create_task(engine.chat(i, tokens=950)) for i in range(8)]
        await until(lambda: _busy(engine))
        engine.engine._defer_s = 1.0
        try:
            async with engine.engine.session(workload()) as prove:
                return await prove(range(3))
        finally:
            engine.engine._defer_s = 5.0
            await asyncio.gather(*chats)

    outcome = engine.run(scenario())
    assert isinstance(outcome, Deferred)
    assert outcome.seconds >= 1.0


def test_a_call_that_was_stopped_while_deferred_never_runs(engine: EmbeddedEngine) -> None:
    async def scenario() -> int:
        chats = [asyncio.create_task(engine.chat(i, tokens=600)) for i in range(8)]
        await until(lambda: _busy(engine))
        before = (await engine.engine.gauges()).forwards
        async with engine.engine.session(workload()) as prove:
            call = asyncio.create_task(prove(range(3)))
            await asyncio.sleep(0.2)
            await _cancel(call)
        await asyncio.gather(*chats)
        await asyncio.sleep(0.5)
        return (await engine.engine.gauges()).forwards - before

    assert engine.run(scenario()) == 0


def test_blocks_are_lent_for_a_session_and_returned(engine: EmbeddedEngine) -> None:
    async def scenario() -> None:
        before = (await engine.engine.gauges()).free_blocks
        async with engine.engine.session(workload()) as prove:
            await prove(range(3))
            during = await engine.engine.gauges()
            assert during.leased_blocks > 0
            assert during.free_blocks == before - during.leased_blocks
        assert (await engine.engine.gauges()).free_blocks == before

    engine.run(scenario())


def test_blocks_come_back_after_a_failed_forward(engine: EmbeddedEngine) -> None:
    wrong = workload(made_by=scheme("artifact-v1", k_dim=4096))  # exceeds the hidden size

    async def scenario() -> None:
        before = (await engine.engine.gauges()).free_blocks
        async with engine.engine.session(wrong) as prove:
            with pytest.raises(EngineFault, match="k_dim"):
                await prove(range(3))
            assert (await engine.engine.gauges()).free_blocks == before
        await engine.chat(1)

    engine.run(scenario())


def test_a_forward_that_the_pool_cannot_hold_is_a_fault_that_says_what_to_change(
    engine: EmbeddedEngine,
) -> None:
    async def scenario() -> None:
        async with engine.engine.session(workload(seq_len=10**6)) as prove:
            with pytest.raises(EngineFault, match=r"KV blocks.*--poc-forward-batch"):
                await prove(range(3))

    engine.run(scenario())


def test_blocks_of_an_api_process_that_vanished_come_back(engine: EmbeddedEngine) -> None:
    async def scenario() -> None:
        before = (await engine.engine.gauges()).free_blocks
        forgotten = engine.engine.session(workload())
        prove = await forgotten.__aenter__()
        await prove(range(3))
        assert (await engine.engine.gauges()).free_blocks < before

        async def returned() -> bool:
            return (await engine.engine.gauges()).free_blocks == before

        await until(returned)
        await forgotten.__aexit__(None, None, None)  # a release that comes too late is no fault

    engine.run(scenario())


async def _true(value: bool) -> bool:
    return value


async def _busy(engine: EmbeddedEngine) -> bool:
    return (await engine.engine.gauges()).unfinished_requests > 0


async def _cancel(task: "asyncio.Task[object]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
