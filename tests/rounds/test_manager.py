import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from proofserve.rounds.errors import EngineFault, EngineGone, OutboxUnavailable, Refusal, Refused
from proofserve.rounds.manager import RoundManager
from proofserve.rounds.records import JobState, Proofs, Target, Workload
from proofserve.rounds.state import Move, State
from proofserve.rounds.status import EngineGauges
from rounds.doubles import QUICK, MemoryOutbox, job, round_spec
from support.fake_engine import FakeEngine
from support.pace import until
from support.refusals import refused

pytestmark = pytest.mark.anyio


class Bench:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.engine.latency_s = 0.001
        self.outbox = MemoryOutbox()
        self.manager = RoundManager(self.engine, self.outbox, QUICK)

    @property
    def state(self) -> State:
        return self.manager.status().state


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.manager.aclose()
    assert bench.engine.leases == 0


async def test_a_fresh_node_is_idle(bench: Bench) -> None:
    status = bench.manager.status()
    assert (status.state, status.spec, status.stats) == (State.IDLE, None, None)
    assert (status.paused_reason, status.error) == (None, None)
    assert status.queue.limit == 100


async def test_start_and_stop(bench: Bench) -> None:
    spec = round_spec()
    await bench.manager.configure(spec, Move.START)
    assert bench.state is State.GENERATING
    await until(lambda: bench.outbox.rows)
    await bench.manager.stop()
    status = bench.manager.status()
    assert (status.state, status.spec, status.error) == (State.STOPPED, spec, None)
    assert status.stats is not None
    assert status.stats.total_processed == len(bench.outbox.rows) > 0
    assert bench.outbox.open == bench.outbox.closed == ["round"]


async def test_a_second_start_is_refused_and_changes_nothing(bench: Bench) -> None:
    await bench.manager.configure(round_spec("one"), Move.START)
    with refused(Refusal.ALREADY_GENERATING):
        await bench.manager.configure(round_spec("two"), Move.START)
    assert bench.outbox.open == ["one"]
    status = bench.manager.status()
    assert status.spec is not None
    assert (status.state, status.spec.round_id) == (State.GENERATING, "one")


async def test_of_two_starts_at_once_one_is_refused(bench: Bench) -> None:
    bench.outbox.latency_s = 0.01
    outcomes = await asyncio.gather(
        *(bench.manager.configure(round_spec(name), Move.START) for name in "ab"),
        return_exceptions=True,
    )
    assert outcomes[0] is None
    assert isinstance(outcomes[1], Refused)
    assert bench.outbox.open == ["a"]


async def test_stop_is_always_legal(bench: Bench) -> None:
    await bench.manager.stop()
    assert bench.state is State.STOPPED
    await bench.manager.configure(round_spec(), Move.START)
    await asyncio.gather(bench.manager.stop(), bench.manager.stop())
    await bench.manager.stop()
    assert bench.state is State.STOPPED
    assert bench.outbox.closed == ["round"]


async def test_a_stopped_node_starts_anew(bench: Bench) -> None:
    for name in ("one", "two"):
        stored = len(bench.outbox.rows)
        await bench.manager.configure(round_spec(name), Move.START)
        await until(lambda before=stored: len(bench.outbox.rows) > before)
        await bench.manager.stop()
        assert bench.outbox.rows[-1].round_id == name
    assert bench.outbox.closed == ["one", "two"]


async def test_a_round_that_cannot_be_written_down_does_not_start(bench: Bench) -> None:
    bench.outbox.full = "disk full"
    with pytest.raises(OutboxUnavailable):
        await bench.manager.configure(round_spec(), Move.START)
    assert bench.state is State.IDLE
    assert bench.engine.calls == []
    assert isinstance(await bench.manager.run(job(1)), Proofs)


async def test_jobs_wait_for_the_round_and_callers_get_theirs_after_it(bench: Bench) -> None:
    await bench.manager.configure(round_spec(), Move.START)
    waiting = asyncio.create_task(bench.manager.run(job(1000)))
    submitted = await bench.manager.submit(job(2000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert (await bench.manager.result(submitted)).state is JobState.QUEUED
    await bench.manager.stop()
    assert isinstance(await waiting, Proofs)
    assert (await bench.manager.result(submitted)).state is JobState.CANCELLED
    assert (2000,) not in bench.engine.calls


async def test_the_end_of_a_round_by_a_fault_lets_jobs_run(bench: Bench) -> None:
    await bench.manager.configure(round_spec(), Move.START)
    bench.engine.faults = 10**9
    submitted = await bench.manager.submit(job(1000))
    await until(lambda: bench.state is State.STOPPED)
    assert (bench.manager.status().error or "").startswith("3 faults in a row")
    # It was asked, and so the job ran.
    while (view := await bench.manager.result(submitted)).state is not JobState.FAILED:
        assert view.state in (JobState.QUEUED, JobState.RUNNING)
        await asyncio.sleep(0.001)


async def test_a_dead_engine_stops_the_round_and_the_error_stays_visible(bench: Bench) -> None:
    await bench.manager.configure(round_spec(), Move.START)
    bench.engine.gone = True
    await until(lambda: bench.state is State.STOPPED)
    assert bench.manager.status().error == "the toy engine is dead"
    with pytest.raises(EngineGone):
        await bench.manager.engine_gauges()
    await bench.manager.stop()
    assert bench.manager.status().error == "the toy engine is dead"


async def test_an_engine_that_does_not_answer_is_not_waited_for(bench: Bench) -> None:
    async def gauges() -> EngineGauges:
        await asyncio.sleep(60)
        raise EngineGone

    bench.engine.gauges = gauges  # type: ignore[method-assign]
    with pytest.raises(EngineFault, match=r"did not answer within 0\.2 s"):
        await bench.manager.engine_gauges()


async def test_a_busy_engine_is_asked_once_and_its_late_answer_is_kept(bench: Bench) -> None:
    first = await bench.manager.engine_gauges()
    answer, asked = asyncio.Event(), list[int]()

    async def gauges() -> EngineGauges:
        asked.append(1)
        await answer.wait()
        return replace(first, forwards=7)

    bench.engine.gauges = gauges  # type: ignore[method-assign]
    for _ in range(2):
        seen = await bench.manager.engine_gauges()
        assert replace(seen, age_s=0.0) == first
        assert seen.age_s > 0
    assert asked == [1]
    answer.set()
    await asyncio.sleep(0.01)
    answer.clear()
    assert (await bench.manager.engine_gauges()).forwards == 7


async def test_the_engine_chooses_the_forwards_of_each_round_that_is_configured(
    bench: Bench,
) -> None:
    one, two = round_spec("one", target=Target(1.5)), round_spec("two")
    await bench.manager.configure(one, Move.INIT)
    await bench.manager.generate()
    with refused(Refusal.ALREADY_GENERATING):
        await bench.manager.configure(two, Move.START)
    assert bench.engine.fitted == [one.work]
    await bench.manager.stop()
    await bench.manager.configure(two, Move.START)
    assert bench.engine.fitted == [one.work, two.work]


async def test_a_round_starts_although_its_engine_cannot_choose(bench: Bench) -> None:
    async def fit(_work: Workload) -> None:
        raise EngineFault("no room for a forward")

    bench.engine.fit = fit  # type: ignore[method-assign]
    await bench.manager.configure(round_spec(), Move.START)
    await until(lambda: bench.outbox.rows)


async def test_a_stop_whose_caller_leaves_still_stops(bench: Bench) -> None:
    await bench.manager.configure(round_spec(), Move.START)
    await until(lambda: bench.outbox.rows)
    bench.outbox.latency_s = 0.05
    stopping = asyncio.create_task(bench.manager.stop())
    await asyncio.sleep(0.01)
    stopping.cancel()
    await asyncio.wait({stopping})
    await until(lambda: bench.state is State.STOPPED)
    await bench.manager.configure(round_spec("two"), Move.START)
    assert bench.state is State.GENERATING


async def test_closing_ends_every_task() -> None:
    bench, before = Bench(), asyncio.all_tasks()
    await bench.manager.configure(round_spec(), Move.START)
    await bench.manager.submit(job(1000))
    await until(lambda: bench.outbox.rows)
    await bench.manager.aclose()
    assert asyncio.all_tasks() == before
