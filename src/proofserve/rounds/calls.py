"""One call to an engine session: its answer checked, its refusals paced."""

import asyncio
from collections.abc import Sequence

from proofserve.rounds.batches import checked
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
