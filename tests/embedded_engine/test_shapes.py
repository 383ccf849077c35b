"""Other deployments of the adapter: two ranks, other architectures, a model that is broken."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from proofserve.engines.vllm import compat_client
from proofserve.protocol.network_schemes import DistanceScheme
from proofserve.rounds.records import ProofBatch
from support import ranks
from support.engines import SKETCH, EmbeddedEngine, workload
from support.models import SmallModels
from support.reference import reference_vectors

pytestmark = pytest.mark.engine

DISTANCES = (DistanceScheme(), DistanceScheme(sign_flips=False, layer_hooks=True))
OneRank = tuple[NDArray[np.float32], NDArray[np.float32], list[ProofBatch]]
Start = Callable[..., AbstractContextManager[EmbeddedEngine]]


@pytest.fixture
def start(cpu_environment: pytest.MonkeyPatch) -> Start:
    @contextmanager
    def started(model: Path, **options: Any) -> Iterator[EmbeddedEngine]:
        engine = EmbeddedEngine(model, **options)
        try:
            yield engine
        finally:
            engine.close()

    return started


@pytest.fixture(scope="module")
def distance_batches(engine: EmbeddedEngine) -> list[ProofBatch]:
    """Nonces 0..31 on one rank by each of ``DISTANCES``."""
    return [engine.run(engine.prove(workload(made_by=s), range(32))) for s in DISTANCES]


@pytest.fixture(scope="module")
def one_rank(
    vectors: NDArray[np.float32], sketches: NDArray[np.float32], distance_batches: list[ProofBatch]
) -> OneRank:
    return vectors, sketches, distance_batches


def distances(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.linalg.norm(a - b, axis=1)


def figures(found: NDArray[np.float32]) -> str:
    return f"mean {found.mean():.6f}, largest {found.max():.6f}"


async def chat_beside_proofs(engine: EmbeddedEngine) -> None:
    """Greedy chat answers the same before and while a session proves."""
    before = [await engine.chat(i) for i in range(4)]
    async with engine.engine.session(workload()) as prove:
        proofs = asyncio.gather(prove(range(64)), prove(range(64, 128)))
        assert [await engine.chat(i) for i in range(4)] == before
        await proofs


def test_forwards_that_pause_after_each_layer_have_the_same_bits_and_chat_runs_in_the_pauses(
    tiny: Path, start: Start, one_rank: OneRank, cpu_environment: pytest.MonkeyPatch
) -> None:
    # No layer is as short as that.
    cpu_environment.setenv("POC_MAX_WAIT_MS", "1")
    try:
        with start(tiny, dtype="float32") as engine:
            batch = engine.run(engine.prove(workload(), range(32)))
            sketched = engine.run(engine.prove(workload(made_by=SKETCH), range(16)))
            ours = [engine.run(engine.prove(workload(made_by=s), range(32))) for s in DISTANCES]
            engine.run(chat_beside_proofs(engine))
            gauges = engine.run(engine.engine.gauges())
    finally:
        cpu_environment.delenv("POC_MAX_WAIT_MS")
    vectors, sketches, distance_batches = one_rank
    assert np.array_equal(batch.values, vectors)
    assert np.array_equal(sketched.values, sketches)
    for mine, theirs in zip(ours, distance_batches, strict=True):
        assert np.array_equal(mine.values, theirs.values)
    # Of eight nonces each, and a part for each layer.
    assert gauges.forwards >= 2 * (4 + 2 + 4 + 4)
    assert gauges.part_s <= 0.8 * gauges.forward_s
    assert "--poc-max-wait-ms" in (gauges.warning or "")


def test_one_rank_agrees_with_transformers(tiny: Path, vectors: NDArray[np.float32]) -> None:
    expected = reference_vectors(tiny, workload(), range(32), torch.float32)
    assert distances(vectors, expected).max() < 0.002


def test_sketches_agree_with_transformers(tiny: Path, sketches: NDArray[np.float32]) -> None:
    work = workload(made_by=SKETCH)
    expected = reference_vectors(tiny, work, range(16), torch.float32)
    rounded = reference_vectors(tiny, work, range(16), torch.bfloat16)
    ours, noise = distances(sketches, expected), distances(rounded, expected)
    print(f"1 rank: {figures(ours)}; reference bfloat16: {figures(noise)}")
    assert ours.max() < noise.min() / 10


def test_distances_agree_with_transformers(tiny: Path, distance_batches: list[ProofBatch]) -> None:
    work = workload(made_by=DISTANCES[0])
    expected = reference_vectors(tiny, work, range(32), torch.float32)
    assert np.abs(distance_batches[0].values - expected).max() < 1e-4


@pytest.mark.parametrize(
    "parallel",
    ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.slow)],
)
def test_two_ranks_agree_with_one_and_chat_works_beside_them(
    parallel: str,
    tiny: Path,
    start: Start,
    one_rank: OneRank,
    cpu_environment: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    cpu_environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options: dict[str, Any] = {parallel: 2, "dtype": "float32", **ranks.EXTENSION}
    if parallel.startswith("pipeline"):
        # vLLM 0.32 on a CPU makes the buffers between stages in a warm-up that eager mode skips.
        options |= {"enforce_eager": False, "gpu_memory_utilization": 0.1}
        cpu_environment.delenv("VLLM_CPU_KVCACHE_SPACE")
    try:
        with start(tiny, **options) as engine:
            batch = engine.run(engine.prove(workload(), range(32)))
            sketched = engine.run(engine.prove(workload(made_by=SKETCH), range(16)))
            ours = [engine.run(engine.prove(workload(made_by=s), range(32))) for s in DISTANCES]
            engine.run(chat_beside_proofs(engine))
            ranks.refuses_other_ranks(engine, tmp_path)
    finally:
        cpu_environment.delenv("VLLM_CPU_OMP_THREADS_BIND")
        cpu_environment.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    vectors, sketches, distance_batches = one_rank
    worst = distances(batch.values, vectors).max()
    print(f"{parallel} 2 against 1: largest distance {worst:.5f}")
    assert worst < 0.02
    apart = distances(sketched.values, sketches)
    print(f"{parallel} 2 against 1, sketches: {figures(apart)}")
    # Two bfloat16 forwards are at 0.01 and beyond.
    assert apart.max() < 0.001
    for mine, theirs in zip(ours, distance_batches, strict=True):
        assert np.abs(mine.values - theirs.values).max() < 1e-3


@pytest.mark.parametrize("arch", [pytest.param("llama", marks=pytest.mark.slow), "gemma3"])
def test_other_architectures(arch: str, small_models: SmallModels, start: Start) -> None:
    model = small_models.get(arch)
    work = workload(seq_len=256)  # longer than the sliding window of the Gemma shape
    with start(model) as engine:
        batch = engine.run(engine.prove(work, range(16)))
        before = engine.run(engine.engine.gauges()).free_blocks
        engine.run(chat_beside_proofs(engine))
        assert engine.run(engine.engine.gauges()).free_blocks == before
        groups = len(engine.run(_groups(engine)))
    assert groups >= (2 if arch == "gemma3" else 1)
    expected = reference_vectors(model, work, range(16), torch.bfloat16)
    # Two bfloat16 forwards round differently; a wrong mask or window is at 0.3 and beyond.
    assert distances(batch.values, expected).max() < 0.1


async def _groups(engine: EmbeddedEngine) -> list[Any]:
    read: list[Any] = await compat_client.call_engine(engine.llm, "get_kv_cache_group_metadata")
    return read


@pytest.fixture
def broken(engine: EmbeddedEngine) -> Iterator[EmbeddedEngine]:
    """The engine of all tests, with a last norm that is not a number."""
    engine.run(engine.llm.collective_rpc("spoil"))
    try:
        yield engine
    finally:
        engine.run(engine.llm.collective_rpc("mend"))


def test_rows_that_are_not_finite_are_reported_and_the_engine_lives(
    broken: EmbeddedEngine, vectors: NDArray[np.float32]
) -> None:
    batch = broken.run(broken.prove(workload(), range(5)))
    assert batch.nonces == ()
    assert batch.failed == (0, 1, 2, 3, 4)
    # Triton's interpreter refuses the largest of logits that are no numbers; a kernel does not.
    if os.environ.get("TRITON_INTERPRET") == "1":
        batch = broken.run(broken.prove(workload(), range(5)))
        assert batch.failed == (0, 1, 2, 3, 4)
    else:
        assert len(broken.run(broken.chat(1))) == 16
    broken.run(broken.llm.collective_rpc("mend"))
    np.testing.assert_array_equal(broken.run(broken.prove(workload(), range(32))).values, vectors)


@pytest.mark.slow
def test_a_share_lets_proofs_run_under_endless_chat(
    tiny: Path, start: Start, cpu_environment: pytest.MonkeyPatch
) -> None:
    cpu_environment.setenv("POC_SHARE", "0.3")

    async def scenario(engine: EmbeddedEngine) -> float:
        """Share of the engine's time that proofs got while chat never paused."""
        alone = await engine.chat(1, tokens=900)
        chat = asyncio.create_task(engine.chat(1, tokens=900))
        async with engine.engine.session(workload()) as prove:
            began, before = time.monotonic(), (await engine.engine.gauges()).busy_s
            for first in range(0, 64, 16):
                assert isinstance(await prove(range(first, first + 16)), ProofBatch)
            share = (await engine.engine.gauges()).busy_s - before
            elapsed = time.monotonic() - began
        assert not chat.done()
        assert await chat == alone
        return share / elapsed

    try:
        with start(tiny) as engine:
            assert 0.1 < engine.run(scenario(engine)) < 0.45
    finally:
        cpu_environment.delenv("POC_SHARE")
