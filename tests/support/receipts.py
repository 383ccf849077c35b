"""Finished answers of a real engine, against the reference engine in float32."""

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from proofserve.engines.receipts.client import VllmAnswers
from proofserve.engines.reference.forward import states_of
from proofserve.engines.reference.network import load
from proofserve.protocol.receipts.record import FinishedAnswer
from proofserve.protocol.receipts.sketches import ReceiptScheme, sketches
from support.engines import EmbeddedEngine


class Checker:
    """Recomputes answers by one forward over prompt and answer."""

    def __init__(self, model: Path) -> None:
        self.network = load(model, "float32", "cpu")

    @torch.inference_mode()
    def distances(self, answer: FinishedAnswer) -> NDArray[np.float32]:
        """How far each token's sketch is from the recomputed one, relative to its length."""
        assert answer.sketches is not None
        digest = self.network.facts.weights_digest
        assert digest is not None
        scheme = ReceiptScheme(answer.sketch_key, digest, answer.k_dim)
        (chose,) = states_of(self.network, [(answer.prompt_ids, answer.output_ids)])
        rows = scheme.rows(chose.shape[1], torch.device("cpu"))
        expected = sketches(chose, rows).numpy()
        ours = np.frombuffer(answer.sketches, "<f2").astype(np.float32).reshape(expected.shape)
        made: NDArray[np.float32] = np.linalg.norm(ours - expected, axis=1)
        return made / np.linalg.norm(expected, axis=1)

    def worst(self, answers: Collection[FinishedAnswer]) -> float:
        return max(float(self.distances(each).max()) for each in answers)


async def collected(answers: VllmAnswers, ids: Collection[str]) -> list[FinishedAnswer]:
    """The answers of the responses ``ids``; those of other tests are left out."""
    found: list[FinishedAnswer] = []
    while not set(ids) <= {each.response_id for each in found}:
        found += [a for a in await answers.finished_answers() if a.response_id in ids]
    return found


def prompt(number: int, length: int) -> list[int]:
    return [(number * 37 + i * 11) % 1500 + 100 for i in range(length)]


async def ask(
    engine: EmbeddedEngine,
    request_id: str,
    ids: list[int],
    tokens: int = 24,
    lora: LoRARequest | None = None,
    **sampling: Any,
) -> list[tuple[int, ...]]:
    """The answers to a prompt, as the client gets them; greedy by default."""
    chosen = {"temperature": 0.0, "ignore_eos": True, "max_tokens": tokens, **sampling}
    # Of several answers an output has those that went on since the last one.
    newest: dict[int, tuple[int, ...]] = {}
    async for output in engine.llm.generate(
        {"prompt_token_ids": ids}, SamplingParams(**chosen), request_id, lora_request=lora
    ):
        newest |= {each.index: tuple(each.token_ids) for each in output.outputs}
    return [newest[index] for index in sorted(newest)]


async def chats(engine: EmbeddedEngine, name: str) -> list[list[tuple[int, ...]]]:
    """Greedy answers to six prompts of 30 to 75 tokens, three at a time."""
    found: list[list[tuple[int, ...]]] = []
    for first in (0, 3):
        found += await asyncio.gather(
            *(
                ask(engine, f"chatcmpl-{name}-{i}", prompt(i, 30 + 9 * i))
                for i in range(first, first + 3)
            )
        )
    return found


async def leave_after(engine: EmbeddedEngine, request_id: str, ids: list[int], tokens: int) -> None:
    """A client that leaves when it has read so many tokens."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=800)
    stream = engine.llm.generate({"prompt_token_ids": ids}, sampling, request_id)
    async for output in stream:
        if len(output.outputs[0].token_ids) >= tokens:
            break
    await stream.aclose()
