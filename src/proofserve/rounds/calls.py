"""One call to an engine session: its answer checked, its refusals paced."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proofserve.rounds.batches import checked
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.ports import ProofSession
from proofserve.rounds.records import Deferred, ProofBatch

# An engine waits for chat before it says "deferred", so callers ask again at once. One that says
# so without waiting must not turn them into a busy loop.
SHORTEST_DEFERRAL_S = 0.05


async def ask(session: ProofSession, nonces: Sequence[int], width: int) -> ProofBatch | Deferred:
    """The checked batch of ``nonces``, or the engine's refusal, which takes 50 ms at least.

    Raises:
        EngineFault: the computation failed, or its answer cannot be used.
        EngineGone: there is no engine any more.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    answer = await session.prove(nonces)
    if isinstance(answer, Deferred):
        await asyncio.sleep(max(0.0, began + SHORTEST_DEFERRAL_S - loop.time()))
        return answer
    return checked(answer, nonces, width)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long chat may hold one chunk back before its caller gives up: seconds of ``clock``."""

    seconds: float
    clock: Callable[[], float]

    async def insist(self, session: ProofSession, nonces: Sequence[int], width: int) -> ProofBatch:
        """``ask`` until there is a batch.

        Raises:
            EngineFault: the computation failed, or chat held it back for too long.
            EngineGone: there is no engine any more.
        """
        deadline = self.clock() + self.seconds
        while True:
            answer = await ask(session, nonces, width)
            if not isinstance(answer, Deferred):
                return answer
            if self.clock() >= deadline:
                raise EngineFault(
                    f"skipped: chat held a chunk back for more than {self.seconds:g} s"
                    f" ({answer.reason})"
                )


def chunks(nonces: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """``nonces`` in order, ``size`` at a time."""
    return [tuple(nonces[start : start + size]) for start in range(0, len(nonces), size)]
