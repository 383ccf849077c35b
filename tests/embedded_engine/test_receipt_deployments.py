"""The tap of receipts in rare deployments, each with an engine of its own."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
import pytest
from vllm.lora.request import LoRARequest

from proofserve.engines.receipts import client
from support.adapters import merged, write_adapter
from support.engines import EmbeddedEngine, workload
from support.receipts import Checker, ask, collected, leave_after, prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Honest tokens are 0.01 from the reference in float32, another row is about 1 from it.
FARTHEST = 0.05
TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
DEPLOYMENTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "chunked": ({"max_num_batched_tokens": 64, "max_num_seqs": 32}, {}),
    "in step": ({"async_scheduling": False}, {}),
    "preempted": ({"num_gpu_blocks_override": 20}, {}),
    "preempted ahead": ({"num_gpu_blocks_override": 20, "async_scheduling": True}, {}),
    "compiled": ({"enforce_eager": False}, {}),
    "two tensor ranks": ({"tensor_parallel_size": 2}, TWO_CORES),
    # vLLM 0.32 on a CPU makes the buffers between stages in a warm-up that eager mode skips.
    "two stages": (
        {"pipeline_parallel_size": 2, "enforce_eager": False, "gpu_memory_utilization": 0.1},
        {**TWO_CORES, "VLLM_CPU_KVCACHE_SPACE": ""},
    ),
}


def preemptions() -> float:
    """How many requests the newest engine has preempted; vLLM counts anew for each."""
    return sum(
        sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:num_preemptions_total"
    )


async def chat(engine: EmbeddedEngine, tokens: int) -> list[str]:
    """The ids of 18 responses: at the same time, with a cached prefix, and to a client that left.

    Prompts have 40 to 188 tokens.
    """
    ids = [f"chatcmpl-{i}" for i in range(16)]
    await asyncio.gather(
        *(ask(engine, name, prompt(i, 40 + 37 * (i % 5)), tokens) for i, name in enumerate(ids))
    )
    await ask(engine, "chatcmpl-cached", prompt(3, 151))
    await leave_after(engine, "chatcmpl-left", prompt(7, 60), tokens=10)
    return [*ids, "chatcmpl-cached", "chatcmpl-left"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_every_answer_has_right_sketches(
    deployment: str, tiny: Path, cpu_environment: pytest.MonkeyPatch
) -> None:
    options, environment = DEPLOYMENTS[deployment]
    with cpu_environment.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value) if value else patch.delenv(name)
        engine = EmbeddedEngine(tiny, **options)
    try:
        answers = engine.run(client.start(engine.llm, engine.engine.engine_info, 32))
        ids = engine.run(chat(engine, tokens=250 if "preempted" in deployment else 24))
        found = engine.run(collected(answers, ids))
        preempted = preemptions()
    finally:
        engine.close()
    assert (preempted > 0) == ("preempted" in deployment)
    assert len(found) == len(ids)
    worst = Checker(tiny).worst(found)
    print(f"{deployment}: {len(found)} answers, farthest token {worst:.4f}")
    assert worst < FARTHEST


def test_an_adapter_is_named_its_answers_are_its_own_and_proofs_are_without_it(
    tiny: Path, tmp_path: Path, cpu_environment: pytest.MonkeyPatch
) -> None:
    base, adapted = Checker(tiny), Checker(tiny)
    adapted.network = merged(base.network, write_adapter(tmp_path / "adapter", base.network))
    lora = LoRARequest("french", 1, str(tmp_path / "adapter"))
    # Two places, because vLLM 0.32 on a CPU applies the last one to requests without an adapter.
    engine = EmbeddedEngine(tiny, enable_lora=True, max_lora_rank=8, max_loras=2)
    try:
        answers = engine.run(client.start(engine.llm, engine.engine.engine_info, 32))

        async def both() -> None:
            await asyncio.gather(
                ask(engine, "chatcmpl-base", prompt(1, 60)),
                ask(engine, "chatcmpl-lora", prompt(1, 60), lora=lora),
            )

        before = engine.run(engine.prove(workload(), range(16))).values
        engine.run(both())
        # The step before has an adapter for every request.
        engine.run(ask(engine, "chatcmpl-last", prompt(2, 60), lora=lora))
        after = engine.run(engine.prove(workload(), range(16))).values
        found = engine.run(collected(answers, ["chatcmpl-base", "chatcmpl-lora"]))
    finally:
        engine.close()
    np.testing.assert_array_equal(after, before)
    plain, changed = sorted(found, key=lambda each: each.response_id)
    assert (plain.adapter, changed.adapter) == (None, "french")
    assert base.worst([plain]) < FARTHEST
    assert adapted.worst([changed]) < FARTHEST
    assert base.distances(changed).min() > FARTHEST
