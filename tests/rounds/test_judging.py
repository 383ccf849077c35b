import asyncio

import pytest

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.identity import Block
from proofserve.protocol.schemes import scheme
from proofserve.rounds.computation import Computation, NonceLimit, winners_among
from proofserve.rounds.errors import EngineFault, EngineGone, Refusal
from proofserve.rounds.records import DistanceClaims, DistanceVerdict, Target, Workload
from proofserve.rounds.status import NodeTotals
from rounds.doubles import round_spec
from support.fake_engine import FakeEngine
from support.refusals import refused

pytestmark = pytest.mark.anyio

BLOCK = Block("block", 7)
TARGET = Target(1.41, 0.01)
SPEC = round_spec(work=Workload(scheme("distance-v1"), BLOCK, "key", 16), target=TARGET, lane=None)


class Bench:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.now = 0.0
        self.admission = NonceLimit(40)
        self.computation = Computation(
            self.engine, asyncio.Event(), self.admission, 10.0, NodeTotals(), self._tick
        )

    def _tick(self) -> float:
        self.now += 4.0
        return self.now

    async def judge(self, *nonces: int, distance: float = 1.0, key: str = "key") -> DistanceVerdict:
        made = DistanceClaims(BLOCK, key, 0, nonces, (distance,) * len(nonces))
        return await self.computation.judge(SPEC, TARGET, made)

    def assert_idle(self) -> None:
        assert self.engine.leases == 0
        assert self.admission.gauges.queued_nonces == 0


async def test_a_claim_is_valid_when_both_distances_are_below_the_target() -> None:
    bench = Bench()
    verdict = await bench.judge(*range(40))
    assert verdict.valid == tuple(distance <= 1.41 for distance in verdict.computed)
    assert 0 < winners_among(verdict) == verdict.valid.count(True) < 40
    assert verdict.n_invalid == verdict.valid.count(False)
    assert verdict.fraud_detected
    nothing_claimed = await bench.judge(*range(40), distance=1.41)
    assert nothing_claimed.n_invalid == 40
    bench.assert_idle()


async def test_the_numbers_are_those_of_the_claimant_s_key() -> None:
    bench = Bench()
    ours, theirs = await bench.judge(1, 2, 3), await bench.judge(1, 2, 3, key="another")
    assert ours.computed != theirs.computed
    assert ours.computed == (await bench.judge(1, 2, 3)).computed


@pytest.mark.parametrize(
    ("other", "field"), [(Block("x", 7), "block_hash"), (Block("block", 8), "block_height")]
)
async def test_claims_about_another_block_are_refused(other: Block, field: str) -> None:
    bench = Bench()
    claims = DistanceClaims(other, "key", 0, (1,), (1.0,))
    with refused(Refusal.OTHER_ROUND, match=field):
        await bench.computation.judge(SPEC, TARGET, claims)
    assert bench.engine.calls == []


async def test_no_verdict_without_all_of_the_recomputation() -> None:
    bench = Bench()
    bench.engine.not_finite = frozenset({2})
    with pytest.raises(EngineFault, match="nonce 2"):
        await bench.judge(1, 2, 3)
    bench.engine.not_finite, bench.engine.dropped = frozenset(), frozenset({3})
    with pytest.raises(EngineFault, match="other nonces"):
        await bench.judge(1, 2, 3)
    bench.engine.dropped, bench.engine.faults = frozenset(), 1
    with pytest.raises(EngineFault, match="told to fail"):
        await bench.judge(1, 2, 3)
    bench.engine.gone = True
    with pytest.raises(EngineGone):
        await bench.judge(1, 2, 3)
    bench.assert_idle()


async def test_chat_may_hold_a_chunk_back_for_so_long() -> None:
    bench = Bench()
    bench.engine.deferrals = 2
    await bench.judge(1, 2, 3)
    bench.engine.deferrals = 5
    with pytest.raises(EngineFault, match="delayed a chunk for more than 10 s"):
        await bench.judge(1, 2, 3)
    bench.assert_idle()


async def test_too_many_and_unequal_claims_are_refused() -> None:
    bench = Bench()
    with refused(Refusal.QUEUE_FULL, match="limit is 40"):
        await bench.judge(*range(41))
    with pytest.raises(ProtocolError, match="received"):
        await bench.computation.judge(SPEC, TARGET, DistanceClaims(BLOCK, "key", 0, (1, 2), (1.0,)))
    bench.assert_idle()
