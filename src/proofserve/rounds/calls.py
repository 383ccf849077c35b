"""Calls to an engine: checks the answers, and makes artifacts and distances of them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from proofserve.protocol import DEFAULT_SCHEME
from proofserve.protocol.codec import encode, to_float16
from proofserve.protocol.distance import is_winner
from proofserve.protocol.identity import Block
from proofserve.protocol.schemes import scheme
from proofserve.rounds.errors import ChatBusy, EngineFault
from proofserve.rounds.ports import ProofEngine, ProofSession
from proofserve.rounds.records import (
    Artifact,
    Deferred,
    Finding,
    ProofBatch,
    Target,
    Winner,
    Workload,
)

NOT_FINITE = "the model's output for this nonce was not finite"


def checked(batch: ProofBatch, nonces: Sequence[int], width: int) -> ProofBatch:
    """Return ``batch`` if it has every one of ``nonces`` with finite rows of ``width`` values.

    Raises EngineFault otherwise; then no part of ``batch`` may be used.
    """
    failed = frozenset(batch.failed)
    expected = tuple(nonce for nonce in nonces if nonce not in failed)
    if batch.nonces != expected or not failed <= frozenset(nonces):
        raise EngineFault("the engine answered for other nonces than it was asked for")
    if batch.values.shape != (len(expected), width):
        raise EngineFault(
            f"the engine answered with shape {batch.values.shape}"
            f" where {(len(expected), width)} is needed"
        )
    # Checked in the published type: a finite float32 can be infinite in float16.
    if not np.isfinite(to_float16(batch.values)).all():
        raise EngineFault("the engine answered with values that are not finite")
    return batch


def findings_of(batch: ProofBatch, target: Target | None) -> tuple[Finding, ...]:
    """What a round publishes: every artifact, or the winners by ``target`` (A.2.8)."""
    if target is None:
        return artifacts_of(batch)
    return tuple(
        Winner(nonce, distance)
        for nonce, distance in zip(batch.nonces, distances_of(batch), strict=True)
        if is_winner(distance, target.r_target)
    )


def distances_of(batch: ProofBatch) -> tuple[float, ...]:
    """The one value of every row of a distance batch, widened to a Python float."""
    return tuple(batch.values[:, 0].tolist())


def artifacts_of(batch: ProofBatch) -> tuple[Artifact, ...]:
    texts = encode(batch.values)
    return tuple(Artifact(n, text) for n, text in zip(batch.nonces, texts, strict=True))


def failures_of(batch: ProofBatch) -> dict[int, str]:
    return dict.fromkeys(batch.failed, NOT_FINITE)


# An engine waits for chat before it answers "deferred", so callers ask again at once. This pause
# prevents a busy loop with an engine that answers without waiting.
SHORTEST_DEFERRAL_S = 0.05


async def ask(session: ProofSession, nonces: Sequence[int], width: int) -> ProofBatch | Deferred:
    """The checked batch of ``nonces``, or ``Deferred`` after at least 50 ms.

    Raises EngineFault (the computation failed, or its answer cannot be used) and EngineGone.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    answer = await session.prove(nonces)
    if isinstance(answer, Deferred):
        await asyncio.sleep(max(0.0, began + SHORTEST_DEFERRAL_S - loop.time()))
        return answer
    return checked(answer, nonces, width)


@dataclass(frozen=True, slots=True)
class ChunkDeadline:
    """How long chat may defer one chunk of nonces: ``seconds`` of ``clock``."""

    seconds: float
    clock: Callable[[], float]

    async def retry_until_deadline(
        self, session: ProofSession, nonces: Sequence[int], width: int
    ) -> ProofBatch:
        """Call ``ask`` until the engine computes the batch or the deadline has passed.

        Raises EngineFault (the computation failed, or the deadline has passed) and EngineGone.
        """
        deadline = self.clock() + self.seconds
        while True:
            answer = await ask(session, nonces, width)
            if not isinstance(answer, Deferred):
                return answer
            if self.clock() >= deadline:
                raise EngineFault(
                    f"skipped: chat delayed a chunk for more than {self.seconds:g} s"
                    f" ({answer.reason})"
                )


def chunks(nonces: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(nonces[start : start + size]) for start in range(0, len(nonces), size)]


# Fixed inputs of the self-check, so that its result depends only on the node.
NONCES = (0,)
BLOCK, KEY = Block("proofserve self-check", 0), "proofserve"
# Tokens: one KV block for each sequence on most engines, so that even a nearly full pool has room.
SEQ_LEN = 16


class SelfCheck:
    """Runs one small fixed forward to test the engine. ``clock`` gives monotonic seconds."""

    def __init__(self, engine: ProofEngine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._turn = asyncio.Lock()

    async def run(self) -> float:
        """Run the forward on every engine core at the same time.

        Returns seconds, including the time that chat and a round took before. Raises ChatBusy (chat
        deferred it), EngineFault (it failed or is not finite) and EngineGone.
        """
        cores = range(self._engine.cores)
        async with self._turn:
            began = self._clock()
            results = await asyncio.gather(*map(self._run, cores), return_exceptions=True)
            for result in results:
                if result is not None:
                    raise result
            return self._clock() - began

    async def _run(self, core: int) -> None:
        proof_scheme = scheme(DEFAULT_SCHEME)
        work = Workload(
            proof_scheme, BLOCK, KEY, min(SEQ_LEN, self._engine.engine_info.max_seq_len)
        )
        of_core = f"engine core {core}: " if self._engine.cores > 1 else ""
        try:
            async with self._engine.session(work, core) as session:
                answer = await ask(session, NONCES, proof_scheme.width)
        except EngineFault as fault:
            raise EngineFault(f"{of_core}{fault}") from fault
        if isinstance(answer, Deferred):
            text = f"chat is busy: no forward could run within {answer.seconds:.1f} s"
            raise ChatBusy(f"{of_core}{text}")
        if answer.failed:
            raise EngineFault(f"{of_core}{NOT_FINITE}")
