import asyncio
from collections.abc import Sequence

import pytest

from proofserve.engines.fake import FakeEngine
from proofserve.rounds.calls import SHORTEST_DEFERRAL_S, ask
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import Deferred, ProofBatch
from rounds.doubles import WORK

pytestmark = pytest.mark.anyio


async def test_an_answer_comes_at_once() -> None:
    async with FakeEngine().session(WORK) as session:
        answer = await ask(session, [4, 2], WORK.scheme.width)
    assert isinstance(answer, ProofBatch)
    assert answer.nonces == (4, 2)


async def test_a_deferral_that_did_not_wait_takes_a_while_all_the_same() -> None:
    class Hasty:
        async def prove(self, _: Sequence[int]) -> Deferred:
            return Deferred("chat", 0.0)

    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await ask(Hasty(), [1], 12) == Deferred("chat", 0.0)
    # The loop's clock may wake a sleeper up to its resolution early.
    assert loop.time() - began >= SHORTEST_DEFERRAL_S - 0.005


async def test_a_nonce_that_the_engine_leaves_out_is_a_fault() -> None:
    engine = FakeEngine()
    engine.dropped = frozenset({2})
    async with engine.session(WORK) as session:
        with pytest.raises(EngineFault, match="other nonces"):
            await ask(session, [1, 2, 3], WORK.scheme.width)
