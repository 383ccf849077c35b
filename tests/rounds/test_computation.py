from collections.abc import Callable

import pytest

from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.computation import artifacts_of, validate
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import ProofBatch, StatTest, Verdict
from rounds.doubles import WORK, computed
from support.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

NONCES = tuple(range(10))
# Ten nonces: one honest mismatch is likely enough, two are not.
TEST = StatTest(dist_threshold=0.02, p_mismatch=0.005, fraud_threshold=0.01)


async def honest() -> tuple[list[Claim], ProofBatch]:
    batch = await computed(FakeEngine(), *NONCES)
    return [Claim(a.nonce, a.vector_b64) for a in artifacts_of(batch)], batch


async def test_honest_claims_are_no_fraud() -> None:
    claims, batch = await honest()
    verdict = validate(WORK, NONCES, claims, [batch], TEST)
    assert verdict == Verdict(10, 0, (), 1.0, False)


def swapped(claims: list[Claim]) -> list[Claim]:
    return [Claim(0, claims[1].vector_b64), Claim(1, claims[0].vector_b64), *claims[2:]]


def replaced(text: str) -> Callable[[list[Claim]], list[Claim]]:
    return lambda claims: [Claim(0, text), Claim(1, text), *claims[2:]]


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(swapped, id="other vectors"),
        pytest.param(lambda claims: claims[2:], id="missing"),
        pytest.param(lambda claims: [*claims, *claims[:2]], id="duplicate"),
        pytest.param(replaced(""), id="empty"),
        pytest.param(replaced("AAAA"), id="short"),
        pytest.param(replaced("A" * 64), id="long"),
        pytest.param(replaced("A" * 31), id="no padding"),
        pytest.param(replaced("?" * 32), id="no base64"),
        pytest.param(replaced("AH4A" * 8), id="not a number"),
        pytest.param(replaced("AHwA" * 8), id="infinite"),
        pytest.param(replaced("A" * 32), id="zeros"),
    ],
)
async def test_every_forgery_is_a_mismatch(forge: Callable[[list[Claim]], list[Claim]]) -> None:
    claims, batch = await honest()
    verdict = validate(WORK, NONCES, forge(claims), [batch], TEST)
    assert verdict.n_total == 10
    assert verdict.mismatch_nonces == (0, 1)
    assert verdict.n_mismatch == 2
    assert verdict.p_value < TEST.fraud_threshold
    assert verdict.fraud_detected


async def test_a_recomputation_in_parts_is_as_good() -> None:
    claims, _ = await honest()
    parts = [await computed(FakeEngine(), *NONCES[i : i + 4]) for i in (0, 4, 8)]
    assert not validate(WORK, NONCES, claims, parts, TEST).n_mismatch


async def test_an_incomplete_recomputation_gives_no_verdict() -> None:
    claims, _ = await honest()
    some = await computed(FakeEngine(), *NONCES[:-1])
    with pytest.raises(EngineFault, match=r"no verdict is possible.*nonce 9"):
        validate(WORK, NONCES, claims, [some], TEST)


async def test_a_row_that_is_not_finite_gives_no_verdict() -> None:
    engine = FakeEngine()
    engine.not_finite = frozenset({3})
    batch = await computed(engine, *NONCES)
    with pytest.raises(EngineFault, match=r"nonce 3.*not finite"):
        validate(WORK, NONCES, (await honest())[0], [batch], TEST)
