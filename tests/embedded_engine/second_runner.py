"""Proofs, chat and receipts on vLLM's second model runner, in a process of its own.

Usage: second_runner.py MODEL ADAPTER VECTORS. Writes the vectors of each of ``SCHEMES`` into the
file VECTORS (npz), and prints what else happened as one line of JSON.
"""

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from vllm.lora.request import LoRARequest

from proofserve.engines.receipts import client
from proofserve.rounds.ports import Prove
from support.engines import SKETCH, EmbeddedEngine, workload
from support.receipts import Checker, ask, chats, collected, prompt
from support.second_runner import NONCES, SCHEMES

PARTS = ([5], [15, 0, 7], list(range(12, 3, -1)))


async def vectors(engine: EmbeddedEngine) -> dict[str, Any]:
    return {
        name: (await engine.prove(workload(made_by=each), NONCES)).values
        for name, each in SCHEMES.items()
    }


async def depends_on_its_batch(engine: EmbeddedEngine, whole: dict[str, Any]) -> list[str]:
    """The schemes of which a row differs when other nonces are beside it."""
    changed = []
    for name, each in SCHEMES.items():
        parts = [(await engine.prove(workload(made_by=each), part)).values for part in PARTS]
        if not all(np.array_equal(a, whole[name][b]) for a, b in zip(parts, PARTS, strict=True)):
            changed.append(name)
    return changed


async def forwards(engine: EmbeddedEngine) -> int:
    return (await engine.engine.gauges()).forwards


async def prove_for_ever(prove: Prove) -> None:
    for first in itertools.count(step=16):
        await prove(range(first, first + 16))


async def beside_a_round(engine: EmbeddedEngine) -> tuple[list[list[tuple[int, ...]]], int]:
    """Answers while a session proves, and how many forwards ran between their first and last."""
    async with engine.engine.session(workload(made_by=SKETCH)) as prove:
        await prove(range(16))
        proofs = asyncio.create_task(prove_for_ever(prove))
        before = await forwards(engine)
        given = await chats(engine, "beside")
        during = await forwards(engine) - before
        proofs.cancel()
        await asyncio.wait([proofs])
    return given, during


async def scenario(engine: EmbeddedEngine, model: Path, adapter: Path, out: Path) -> dict[str, Any]:
    free = (await engine.engine.gauges()).free_blocks
    whole = await vectors(engine)
    np.savez(out, **whole)
    changed = await depends_on_its_batch(engine, whole)
    without = await chats(engine, "without")
    answers = await client.start(engine.llm, engine.engine.engine_info, k_dim=32)
    beside, during = await beside_a_round(engine)
    found = await collected(answers, {f"chatcmpl-beside-{i}" for i in range(6)})
    lora = LoRARequest("an adapter", 1, str(adapter))
    (adapted,) = await ask(engine, "chatcmpl-lora", prompt(1, 39), lora=lora)
    after = await vectors(engine)
    return {
        "depends_on_its_batch": changed,
        "same_chat": beside == without,
        "forwards_during_chat": during,
        "answers": len(found),
        "farthest_sketch": Checker(model).worst(found),
        "adapter_changed_chat": adapted != without[1][0],
        "changed_by_an_adapter": [n for n in whole if not np.array_equal(whole[n], after[n])],
        "leaked_blocks": free - (await engine.engine.gauges()).free_blocks,
        "chat": without,
    }


def main(model: Path, adapter: Path, out: Path) -> dict[str, Any]:
    # Two places, because vLLM 0.32 on a CPU applies the last one to requests without an adapter.
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    engine = EmbeddedEngine(model, defer_s=60.0, dtype="float32", **options)
    try:
        happened: dict[str, Any] = engine.run(scenario(engine, model, adapter, out))
    finally:
        engine.close()
    return happened


if __name__ == "__main__":
    print(json.dumps(main(*map(Path, sys.argv[1:4]))))
