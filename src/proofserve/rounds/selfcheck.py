"""One real forward on the node's own account, to know that it could prove."""

import asyncio
from collections.abc import Callable

from proofserve.protocol.schemes import scheme
from proofserve.rounds.batches import NOT_FINITE
from proofserve.rounds.calls import ask
from proofserve.rounds.errors import ChatBusy, EngineFault
from proofserve.rounds.ports import ProofEngine
from proofserve.rounds.records import Deferred, Workload

# Always the same numbers, so that nothing but the node decides the outcome.
NONCES = (0,)
BLOCK, KEY = "proofserve self-check", "nobody"
# Tokens; a block for each sequence of the forward on most engines, so a full pool has room.
SEQ_LEN = 16


class SelfCheck:
    """Forwards of a tiny fixed workload, one at a time however many ask. ``clock``: seconds."""

    def __init__(self, engine: ProofEngine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._turn = asyncio.Lock()

    async def run(self) -> float:
        """Seconds that the forward took, chat and the round's own calls before it included.

        Raises:
            ChatBusy: chat left no time for it.
            EngineFault: it failed, or gave numbers that are not finite.
            EngineGone: there is no engine any more.
        """
        made_by = scheme("artifact-v1")
        seq_len = min(SEQ_LEN, self._engine.engine_info.max_seq_len)
        async with self._turn:
            began = self._clock()
            async with self._engine.session(Workload(made_by, BLOCK, KEY, seq_len)) as session:
                answer = await ask(session, NONCES, made_by.width)
            if isinstance(answer, Deferred):
                raise ChatBusy(f"chat is busy: no forward could run within {answer.seconds:.1f} s")
            if answer.failed:
                raise EngineFault(NOT_FINITE)
            return self._clock() - began
