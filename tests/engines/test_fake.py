import numpy as np
import pytest

from proofserve.protocol.identity import Block
from proofserve.protocol.schemes import scheme
from proofserve.rounds.errors import EngineFault, EngineGone
from proofserve.rounds.records import Deferred, ProofBatch, Workload
from support.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

WORK = Workload(scheme("artifact-v1"), Block("block", 7), "key", 16)


async def prove(engine: FakeEngine, *nonces: int, work: Workload = WORK) -> ProofBatch:
    async with engine.session(work) as call:
        answer = await call(nonces)
    assert isinstance(answer, ProofBatch)
    return answer


async def test_a_vector_does_not_depend_on_its_batch() -> None:
    together = await prove(FakeEngine(), 1, 2, 3)
    alone = await prove(FakeEngine(), 2)
    np.testing.assert_array_equal(together.values[1], alone.values[0])
    assert together.values.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together.values, axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    "other",
    [
        Workload(scheme("artifact-v1"), Block("other", 7), "key", 16),
        Workload(scheme("artifact-v1"), Block("block", 7), "other", 16),
        Workload(scheme("artifact-v1"), Block("block", 7), "key", 17),
    ],
)
async def test_everything_in_a_workload_changes_the_vector(other: Workload) -> None:
    ours, theirs = await prove(FakeEngine(), 1), await prove(FakeEngine(), 1, work=other)
    assert np.linalg.norm(ours.values - theirs.values) > 0.1


async def test_it_misbehaves_as_told() -> None:
    engine = FakeEngine()
    engine.deferrals, engine.faults, engine.not_finite = 1, 1, frozenset({2})
    async with engine.session(WORK) as prove:
        assert engine.leases == 1
        assert isinstance(await prove([1]), Deferred)
        with pytest.raises(EngineFault):
            await prove([1])
        answer = await prove([1, 2])
        assert isinstance(answer, ProofBatch)
        assert (answer.nonces, answer.failed) == ((1,), (2,))
        nothing = await prove([2])
        assert isinstance(nothing, ProofBatch)
        assert nothing.values.shape == (0, 12)
    assert engine.leases == 0
    assert (await engine.gauges()).forwards == 4


async def test_a_dead_engine_says_so_everywhere() -> None:
    engine = FakeEngine()
    async with engine.session(WORK) as prove:
        engine.gone = True
        with pytest.raises(EngineGone):
            await prove([1])
    with pytest.raises(EngineGone):
        await engine.gauges()
    with pytest.raises(EngineGone):
        async with engine.session(WORK):
            pass
