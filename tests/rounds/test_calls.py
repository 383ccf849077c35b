import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from proofserve.rounds.computation import SHORTEST_DEFERRAL_S, artifacts_of, ask, checked
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import Deferred, ProofBatch
from rounds.doubles import WORK
from support.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


async def test_an_answer_comes_at_once() -> None:
    async with FakeEngine().session(WORK) as prove:
        answer = await ask(prove, [4, 2], WORK.scheme.width)
    assert isinstance(answer, ProofBatch)
    assert answer.nonces == (4, 2)


async def test_a_deferral_that_did_not_wait_takes_a_while_all_the_same() -> None:
    async def hasty(_: Sequence[int]) -> Deferred:
        return Deferred("chat", 0.0)

    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await ask(hasty, [1], 12) == Deferred("chat", 0.0)
    # The loop's clock may wake a sleeper up to its resolution early.
    assert loop.time() - began >= SHORTEST_DEFERRAL_S - 0.005


async def test_a_nonce_that_the_engine_leaves_out_is_a_fault() -> None:
    engine = FakeEngine()
    engine.dropped = frozenset({2})
    async with engine.session(WORK) as prove:
        with pytest.raises(EngineFault, match="other nonces"):
            await ask(prove, [1, 2, 3], WORK.scheme.width)


def batch(nonces: tuple[int, ...], failed: tuple[int, ...] = (), width: int = 2) -> ProofBatch:
    return ProofBatch(nonces, np.zeros((len(nonces), width), dtype=np.float32), failed)


def test_a_complete_batch_passes() -> None:
    answer = batch((1, 3), failed=(2,))
    assert checked(answer, [1, 2, 3], 2) is answer
    assert [a.nonce for a in artifacts_of(answer)] == [1, 3]
    assert answer.failed == (2,)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(batch((1, 2)), id="a nonce is missing"),
        pytest.param(batch((1, 3, 2)), id="another order"),
        pytest.param(batch((1, 2, 3, 4)), id="one too many"),
        pytest.param(batch((1, 2, 3), failed=(4,)), id="a failure of another nonce"),
        pytest.param(batch((1, 2, 3), failed=(3,)), id="both there and failed"),
        pytest.param(batch((1, 2, 3), width=3), id="another width"),
        pytest.param(
            ProofBatch((1, 2, 3), np.full((3, 2), np.nan, dtype=np.float32)), id="not a number"
        ),
        pytest.param(
            ProofBatch((1, 2, 3), np.full((3, 2), 1e5, dtype=np.float32)), id="beyond float16"
        ),
    ],
)
def test_anything_else_is_a_fault(answer: ProofBatch) -> None:
    with pytest.raises(EngineFault):
        checked(answer, [1, 2, 3], 2)
