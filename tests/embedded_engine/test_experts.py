"""A mixture whose experts the block chooses, against transformers, and chat beside it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from proofserve.engines.vetting.start import require_equal_ranks
from proofserve.protocol.schemes import scheme
from support import ranks
from support.engines import EmbeddedEngine, workload
from support.models import SmallModels
from support.reference import reference_vectors

pytestmark = pytest.mark.engine

NATURAL, SEEDED = (workload(made_by=scheme(name)) for name in ("sketch-v1", "sketch-v2"))
NONCES = range(8)


@pytest.fixture(scope="module")
def mixture(small_models: SmallModels) -> Path:
    return small_models.get("qwen3_moe")


@pytest.fixture(scope="module")
def engine(mixture: Path, cpu_environment: pytest.MonkeyPatch) -> Iterator[EmbeddedEngine]:
    started = EmbeddedEngine(mixture, dtype="float32")
    yield started
    started.close()


def test_vectors_agree_with_transformers(engine: EmbeddedEngine, mixture: Path) -> None:
    seeded = engine.run(engine.prove(SEEDED, NONCES)).values
    expected = reference_vectors(mixture, SEEDED, NONCES, torch.float32)
    natural = engine.run(engine.prove(NATURAL, NONCES)).values
    apart = np.linalg.norm(seeded - expected, axis=1)
    print(f"largest distance {apart.max():.6f}")
    assert apart.max() < 1e-3
    # Other experts are other numbers, and routing is free again after it.
    assert np.linalg.norm(seeded - natural, axis=1).min() > 0.1
    free = reference_vectors(mixture, NATURAL, NONCES, torch.float32)
    assert np.median(np.linalg.norm(natural - free, axis=1)) < 1e-3


def test_the_batch_does_not_matter(engine: EmbeddedEngine) -> None:
    together = engine.run(engine.prove(SEEDED, NONCES)).values
    alone = [engine.run(engine.prove(SEEDED, [nonce])).values[0] for nonce in (0, 5)]
    assert np.array_equal(together[[0, 5]], np.stack(alone))


async def chat_beside(engine: EmbeddedEngine) -> None:
    before = [await engine.chat(i) for i in range(4)]
    async with engine.engine.session(SEEDED) as prove:
        proofs = asyncio.gather(prove(range(32)), prove(range(32, 64)))
        assert [await engine.chat(i) for i in range(4)] == before
        await proofs
    assert [await engine.chat(i) for i in range(4)] == before


def test_chat_routes_as_ever_before_beside_and_after(engine: EmbeddedEngine) -> None:
    engine.run(chat_beside(engine))


def test_a_start_finds_no_obstacle(engine: EmbeddedEngine) -> None:
    assert engine.run(require_equal_ranks(engine.llm))[1] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "split",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        # Not expert parallel: there vLLM 0.32's kernel for processors ends its worker with a
        # segmentation fault (cpu_fused_moe.cpp), in a first chat without proofs too.
    ],
    ids=["tensor parallel", "pipeline parallel"],
)
def test_two_ranks_agree_with_one(
    engine: EmbeddedEngine,
    mixture: Path,
    cpu_environment: pytest.MonkeyPatch,
    split: dict[str, int],
) -> None:
    one = engine.run(engine.prove(SEEDED, NONCES)).values
    cpu_environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    several = EmbeddedEngine(mixture, dtype="float32", **split, **ranks.EXTENSION)
    try:
        assert several.run(require_equal_ranks(several.llm))[1] is None
        two = several.run(several.prove(SEEDED, NONCES)).values
    finally:
        several.close()
        cpu_environment.delenv("VLLM_CPU_OMP_THREADS_BIND")
    apart = np.linalg.norm(two - one, axis=1).max()
    print(f"2 ranks against 1: {apart:.6f}")
    assert apart < 1e-3


@pytest.mark.slow
def test_a_compiled_engine_agrees_with_an_eager_one(
    engine: EmbeddedEngine, mixture: Path, cpu_environment: pytest.MonkeyPatch
) -> None:
    eager = engine.run(engine.prove(SEEDED, NONCES)).values
    compiled = EmbeddedEngine(mixture, dtype="float32", enforce_eager=False)
    try:
        compiled.run(chat_beside(compiled))
        apart = compiled.run(compiled.prove(SEEDED, NONCES)).values - eager
    finally:
        compiled.close()
    print(f"compiled against eager: {np.linalg.norm(apart, axis=1).max():.6f}")
    assert np.linalg.norm(apart, axis=1).max() < 1e-3
