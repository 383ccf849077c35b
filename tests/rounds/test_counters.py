import asyncio

import pytest

from proofserve.rounds.errors import EngineFault, Refusal, Refused
from proofserve.rounds.records import Verdict
from proofserve.rounds.status import Counters, NodeTotals


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_round_that_just_began_has_no_rate() -> None:
    stats = Counters(Clock(), NodeTotals()).read()
    assert (
        stats.total_processed,
        stats.elapsed_s,
        stats.nonces_per_second,
        stats.recent_nonces_per_second,
    ) == (0, 0, 0, 0)


def test_the_recent_rate_forgets_what_the_whole_rate_remembers() -> None:
    clock = Clock()
    counters = Counters(clock, NodeTotals(), window_s=10)
    clock.now += 5
    counters.done(100, 100, 2)
    young = counters.read()
    assert young.nonces_per_second == young.recent_nonces_per_second == pytest.approx(20)
    clock.now += 15
    counters.done(30, 30, 0)
    old = counters.read()
    assert old.nonces_per_second == pytest.approx(130 / 20)
    assert old.recent_nonces_per_second == pytest.approx(3)
    assert (old.total_processed, old.failed, old.elapsed_s) == (130, 2, 20)


def test_an_ended_round_keeps_its_rates() -> None:
    clock = Clock()
    counters = Counters(clock, NodeTotals())
    clock.now += 4
    counters.done(8, 8, 0)
    counters.end()
    clock.now += 1000
    assert (
        counters.read().nonces_per_second
        == counters.read().recent_nonces_per_second
        == pytest.approx(2)
    )


def test_deferrals_and_faults_are_counted() -> None:
    counters = Counters(Clock(), NodeTotals())
    counters.deferred(2.5)
    counters.deferred(0.5)
    counters.fault()
    stats = counters.read()
    assert (stats.deferred_calls, stats.deferred_s, stats.faults) == (2, 3.0, 1)


pytestmark = pytest.mark.anyio


async def verdict(fraud: bool = False) -> Verdict:
    return Verdict(4, 0, (), 1.0, fraud)


async def fails(error: BaseException) -> Verdict:
    raise error


async def test_a_verdict_is_counted_once_and_handed_on() -> None:
    totals = NodeTotals()
    assert (await totals.judged(verdict())).n_total == 4
    assert (await totals.judged(verdict(fraud=True))).fraud_detected
    assert totals.validations == {"honest": 1, "fraud": 1, "error": 0}


@pytest.mark.parametrize(
    ("error", "counted"),
    [(EngineFault("no"), 1), (Refused(Refusal.QUEUE_FULL, "no"), 0), (asyncio.CancelledError(), 0)],
    ids=["fault", "refusal", "caller left"],
)
async def test_only_what_began_and_failed_is_an_error(error: BaseException, counted: int) -> None:
    totals = NodeTotals()
    with pytest.raises(type(error)):
        await totals.judged(fails(error))
    assert totals.validations["error"] == counted
