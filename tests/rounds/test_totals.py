"""What a node counts over all its rounds."""

import asyncio

import pytest

from proofserve.rounds.errors import EngineFault, QueueFull
from proofserve.rounds.records import Verdict
from proofserve.rounds.totals import NodeTotals

pytestmark = pytest.mark.anyio


async def verdict(fraud: bool = False) -> Verdict:
    return Verdict(4, 0, (), 1.0, fraud)


async def fails(error: BaseException) -> Verdict:
    raise error


async def test_a_verdict_is_counted_once_and_handed_on() -> None:
    tally = NodeTotals()
    assert (await tally.judged(verdict())).n_total == 4
    assert (await tally.judged(verdict(fraud=True))).fraud_detected
    assert tally.validations == {"honest": 1, "fraud": 1, "error": 0}


@pytest.mark.parametrize(
    ("error", "counted"),
    [(EngineFault("no"), 1), (QueueFull("no"), 0), (asyncio.CancelledError(), 0)],
    ids=["fault", "refusal", "caller left"],
)
async def test_only_what_began_and_failed_is_an_error(error: BaseException, counted: int) -> None:
    tally = NodeTotals()
    with pytest.raises(type(error)):
        await tally.judged(fails(error))
    assert tally.validations["error"] == counted
