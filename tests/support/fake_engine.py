"""An engine without a model, for tests; it can be made to misbehave."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from proofserve.protocol.draws import normal
from proofserve.protocol.identity import Challenge, seed
from proofserve.protocol.receipts.record import FinishedAnswer
from proofserve.protocol.scheme import AllowedTokens, ModelFacts
from proofserve.rounds.errors import EngineFault, EngineGone
from proofserve.rounds.ports import Prove
from proofserve.rounds.records import Deferred, EngineInfo, ProofBatch, Workload
from proofserve.rounds.status import EngineGauges, over_cores

TOY_FACTS = ModelFacts(64, weights_digest="70" * 32, tokens=AllowedTokens(((10, 210),)))
TOY_ENGINE_INFO = EngineInfo(
    model_names=("toy",), facts=TOY_FACTS, max_seq_len=512, versions={"vllm": "none"}
)
_CPU = torch.device("cpu")


class FakeEngine:
    """Answers at once with toy numbers, or misbehaves as its public attributes say.

    The hidden row of a sequence is drawn from the seed of its input string, so equal requests have
    equal proofs and any other request has others; the scheme's own finish does the rest. Every
    position has that row, turned by its number of places.
    """

    def __init__(self, engine_info: EngineInfo = TOY_ENGINE_INFO, cores: int = 1) -> None:
        self.engine_info = engine_info
        self.cores = cores
        self.latency_s = 0.0
        """How long a call takes, in seconds."""
        self.deferrals = 0
        """How many of the next calls are deferred, each for ``deferral_s`` seconds."""
        self.deferral_s = 0.0
        self.faults = 0
        """How many of the next calls fail."""
        self.gone = False
        """Whether the engine process is dead."""
        self.not_finite: frozenset[int] = frozenset()
        """Nonces whose hidden row comes out as NaN."""
        self.dropped: frozenset[int] = frozenset()
        """Nonces that the answer silently leaves out; a real engine must not do that."""
        self.leases = 0
        """Sessions that are open now."""
        self.answers: asyncio.Queue[FinishedAnswer] = asyncio.Queue()
        """Chat answers that end; each is handed over once."""
        self.sketch_key, self.k_dim = "2027-01-15-00", 16
        """What the sketches of these answers are made with."""
        self.calls: list[tuple[int, ...]] = []
        """The nonces of every call, answered or not."""
        self.fitted: list[Workload] = []
        """For what the size of forwards was to be chosen."""
        self.broken_cores: frozenset[int] = frozenset()
        """Engine cores whose calls all fail."""
        self.chat_cores: frozenset[int] = frozenset()
        """Engine cores that defer every call, each for ``deferral_s`` seconds."""
        self.calls_of: list[list[tuple[int, ...]]] = [[] for _ in range(cores)]
        """The same for each engine core."""
        self._one_call = [asyncio.Lock() for _ in range(cores)]
        self._block = cache(
            lambda scheme, block: scheme.for_block(block, self.engine_info.facts, _CPU)
        )

    @asynccontextmanager
    async def session(self, work: Workload, core: int | None = None) -> AsyncIterator[Prove]:
        async def prove(nonces: Sequence[int]) -> ProofBatch | Deferred:
            return await self.answer(work, nonces, core or 0)

        self._require_alive()
        self.leases += 1
        try:
            yield prove
        finally:
            self.leases -= 1

    async def gauges(self) -> EngineGauges:
        """Mostly zeros. Raises EngineGone."""
        self._require_alive()
        idle = over_cores(())
        seen = replace(idle, last_forward_s=self.latency_s, leased_blocks=self.leases)
        return over_cores([replace(seen, forwards=len(each)) for each in self.calls_of])

    async def fit(self, work: Workload) -> None:
        """It has no forwards, and only keeps what was asked. Raises EngineGone."""
        self._require_alive()
        self.fitted.append(work)

    async def finished_answers(self) -> list[FinishedAnswer]:
        """What was put into ``answers``; waits for the first. Raises EngineGone."""
        self._require_alive()
        found = [await self.answers.get()]
        while not self.answers.empty():
            found.append(self.answers.get_nowait())
        return found

    async def answer(
        self, work: Workload, nonces: Sequence[int], core: int = 0
    ) -> ProofBatch | Deferred:
        """What a session answers; each core serves one call after the other."""
        self.calls.append(tuple(nonces))
        self.calls_of[core].append(tuple(nonces))
        async with self._one_call[core]:
            self._require_alive()
            if self.deferrals > 0 or core in self.chat_cores:
                self.deferrals -= core not in self.chat_cores
                await asyncio.sleep(self.deferral_s)
                return Deferred("chat", self.deferral_s)
            await asyncio.sleep(self.latency_s)
            self._require_alive()
            if core in self.broken_cores:
                raise EngineFault(f"toy core {core} is broken")
            if self.faults > 0:
                self.faults -= 1
                raise EngineFault("the toy engine was told to fail")
            return self._compute(work, [n for n in nonces if n not in self.dropped])

    def _require_alive(self) -> None:
        if self.gone:
            raise EngineGone("the toy engine is dead")

    def _compute(self, work: Workload, nonces: Sequence[int]) -> ProofBatch:
        kept = tuple(n for n in nonces if n not in self.not_finite)
        failed = tuple(n for n in nonces if n in self.not_finite)
        width = work.scheme.width
        if not kept:
            return ProofBatch((), np.empty((0, width), dtype=np.float32), failed)
        block = self._block(work.scheme, work.block)
        challenge = Challenge(work.block.hash, work.public_key)
        twins = ("", " twin")[: work.scheme.sequences_per_nonce]
        names = [f"{challenge.input_string(n)} of {work.seq_len}{t}" for n in kept for t in twins]
        rows = normal([seed(name) for name in names], self.engine_info.facts.hidden_size, _CPU)
        if block.reads_every_position:
            rows = torch.stack([rows.roll(place, dims=1) for place in range(work.seq_len)], dim=1)
        return ProofBatch(kept, block.finish(work.public_key, kept, rows).numpy(), failed)
