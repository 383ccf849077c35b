"""A real vLLM async engine inside the test's process, as an embedding application has it."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from proofserve.engines.vllm.client import VllmEngine, served_facts
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import Scheme
from proofserve.protocol.schemes import scheme
from proofserve.rounds.records import EngineInfo, ProofBatch, Workload
from support.node import DTYPE, ONE_PROCESS, SECOND_PROCESS

SEQ_LEN = 64
SKETCH = scheme("sketch-v1")
SEVERAL_RANKS = {"tensor_parallel_size", "pipeline_parallel_size"}


def workload(key: str = "key", seq_len: int = SEQ_LEN, made_by: Scheme | None = None) -> Workload:
    return Workload(made_by or scheme("artifact-v1", k_dim=12), Block("block", 7), key, seq_len)


class SpoilableWorker:
    """Methods that vLLM gives to the workers of an engine with ``SPOILABLE``."""

    get_model: Callable[[], nn.Module]

    def spoil(self) -> None:
        """Let the weights of the last norm be no numbers, as of a broken checkpoint."""
        weight = self.get_model().get_parameter("model.norm.weight")
        self._sound = weight.detach().clone()
        weight.data.fill_(torch.nan)

    def mend(self) -> None:
        self.get_model().get_parameter("model.norm.weight").data.copy_(self._sound)


SPOILABLE = {"worker_extension_cls": f"{__name__}.{SpoilableWorker.__name__}"}


class EmbeddedEngine:
    """An engine and the event loop it lives on; tests are plain functions that call ``run``."""

    def __init__(self, model: Path, defer_s: float = 5.0, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._ids = itertools.count()
        several = SEVERAL_RANKS & options.keys()
        args = {
            "model": str(model),
            "dtype": DTYPE,
            "max_model_len": 1024,
            "enforce_eager": True,
            "distributed_executor_backend": SECOND_PROCESS if several else ONE_PROCESS,
            **options,
        }
        self.llm: AsyncLLM = self.run(self._start(args))
        facts = served_facts(self.llm.vllm_config)
        engine_info = EngineInfo(("tiny",), facts, 1024, {})
        self.engine = VllmEngine(self.llm, engine_info, defer_s, timeout_s=60.0)

    @staticmethod
    async def _start(args: dict[str, Any]) -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**args))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(coroutine)

    def close(self) -> None:
        self.run(self._stop())
        self._runner.close()

    async def _stop(self) -> None:
        self.llm.shutdown()

    async def prove(self, work: Workload, nonces: Any) -> ProofBatch:
        """One call in a session of its own; fails the test if it was deferred."""
        async with self.engine.session(work) as prove:
            outcome = await prove(list(nonces))
        assert isinstance(outcome, ProofBatch), outcome
        return outcome

    async def chat(self, prompt: int, tokens: int = 16) -> tuple[int, ...]:
        """The greedy answer, as token ids, to one of many fixed prompts."""
        ids = [(prompt * 37 + i * 11) % 1500 + 100 for i in range(40)]
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        final = None
        async for output in self.llm.generate(
            {"prompt_token_ids": ids}, sampling, f"chat-{next(self._ids)}"
        ):
            final = output
        assert final is not None
        return tuple(final.outputs[0].token_ids)
