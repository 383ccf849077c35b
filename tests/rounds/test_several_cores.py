"""A round on several engine cores: the same rows as on one, whatever becomes of a core."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from proofserve.rounds.computation import self_check
from proofserve.rounds.errors import EngineFault, Refusal
from proofserve.rounds.generation import Generation
from proofserve.rounds.manager import RoundManager
from proofserve.rounds.records import Limits, RoundProgress
from proofserve.rounds.state import Move
from proofserve.rounds.status import Counters, NodeTotals
from rounds.doubles import QUICK, MemoryOutbox, round_spec
from support.fake_engine import FakeEngine
from support.pace import until
from support.refusals import refused

pytestmark = pytest.mark.anyio


class Bench:
    """One generation on an engine of several cores; each takes a millisecond a call."""

    def __init__(self, cores: int = 2, limits: Limits = QUICK) -> None:
        self.engine = FakeEngine(cores=cores)
        self.engine.latency_s = 0.001
        self.outbox = MemoryOutbox()
        self.spec = round_spec()
        self.counters = Counters(time.monotonic, NodeTotals())
        self.round = Generation(self.engine, self.outbox, limits, self.counters)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Task[None]"]:
        task = asyncio.create_task(self.round.run(self.spec, RoundProgress()))
        try:
            yield task
        finally:
            self.round.stop()
            await asyncio.wait_for(task, 5)

    def assert_sound(self) -> None:
        """Stored are the first nonces of the lane, each once and in order; nothing is left open."""
        lane = self.spec.lane
        assert lane is not None
        assert self.outbox.nonces == list(lane.batch(0, len(self.outbox.rows)))
        assert self.counters.read().total_processed == len(self.outbox.rows)
        assert self.engine.leases == 0

    def proved_by(self, core: int) -> int:
        return self.round.cores[core].proved


async def test_every_core_proves_and_the_rows_are_those_of_one_core() -> None:
    alone, several = Bench(cores=1), Bench(cores=3)
    for bench in (alone, several):
        async with bench.running():
            await until(lambda bench=bench: len(bench.outbox.rows) >= 60)
        bench.assert_sound()
    pairs = zip(alone.outbox.rows, several.outbox.rows, strict=False)
    assert all(one == other for one, other in pairs)
    assert all(len(calls) >= 3 for calls in several.engine.calls_of)
    assert several.round.error is None


async def test_a_core_that_serves_chat_does_not_hold_the_others_up() -> None:
    bench = Bench()
    bench.engine.chat_cores, bench.engine.deferral_s = frozenset({1}), 0.05
    async with bench.running():
        await until(lambda: len(bench.outbox.rows) >= 100)
        assert bench.round.paused_reason is None
        assert bench.proved_by(1) == 0
        # The same batch never waits for the busy core twice in a row.
        assert len(bench.engine.calls_of[1]) == len(set(bench.engine.calls_of[1]))
        bench.engine.chat_cores = frozenset()
        await until(lambda: bench.proved_by(1) > 0)
    bench.assert_sound()
    assert bench.counters.read().deferred_calls > 0


async def test_all_cores_in_chat_pause_the_round_without_a_fault() -> None:
    bench = Bench()
    bench.engine.chat_cores, bench.engine.deferral_s = frozenset({0, 1}), 0.02
    async with bench.running():
        await until(lambda: min(map(len, bench.engine.calls_of)) >= 3)
        assert bench.outbox.rows == []
        bench.engine.chat_cores = frozenset()
        await until(lambda: len(bench.outbox.rows) >= 20)
    bench.assert_sound()
    assert bench.round.error is None


async def test_a_broken_core_stops_alone_and_the_status_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    bench.engine.broken_cores = frozenset({1})
    async with bench.running():
        await until(lambda: bench.round.cores and bench.round.cores[1].stopped)
        stored, calls = len(bench.outbox.rows), len(bench.engine.calls_of[1])
        await until(lambda: len(bench.outbox.rows) >= stored + 100)
        # Its other call may have been under way.
        assert len(bench.engine.calls_of[1]) <= calls + 1
        first, second = bench.round.cores
        assert (first.stopped, first.trouble) == (False, None)
        assert second.trouble == "3 faults in a row, the last one: toy core 1 is broken"
        assert (bench.round.error, bench.round.paused_reason) == (None, None)
    bench.assert_sound()
    text = "engine core 1 of 2 proves no more, 1 go on: 3 faults in a row"
    assert [r.levelno for r in caplog.records if text in r.getMessage()] == [logging.ERROR]


async def test_a_core_with_a_few_faults_goes_on() -> None:
    bench = Bench()
    bench.engine.broken_cores = frozenset({1})
    async with bench.running():
        await until(lambda: bench.round.cores and bench.round.cores[1].trouble)
        bench.engine.broken_cores = frozenset()
        await until(lambda: bench.proved_by(1) > 0 and bench.round.cores[1].trouble is None)
    bench.assert_sound()


async def test_the_round_ends_when_every_core_has_stopped() -> None:
    bench = Bench()
    async with bench.running() as task:
        await until(lambda: len(bench.outbox.rows) >= 20)
        bench.engine.broken_cores = frozenset({0, 1})
        await asyncio.wait_for(asyncio.shield(task), 5)
    bench.assert_sound()
    assert bench.round.error is not None
    assert bench.round.error.startswith("3 faults in a row")


async def test_no_core_runs_ahead_without_end_while_the_oldest_batch_is_held() -> None:
    bench = Bench(limits=replace(QUICK, max_ahead_nonces=40))
    bench.engine.chat_cores, bench.engine.deferral_s = frozenset({1}), 2.0
    async with bench.running():
        await until(lambda: bench.engine.calls_of[1])
        await asyncio.sleep(0.2)
        assert len({nonce for call in bench.engine.calls for nonce in call}) <= 48
        await until(lambda: len(bench.outbox.rows) >= 100)
    bench.assert_sound()


async def test_a_stopped_core_proves_again_in_the_next_start_of_the_round() -> None:
    engine, outbox = FakeEngine(cores=2), MemoryOutbox()
    engine.latency_s, engine.broken_cores = 0.001, frozenset({0})
    manager = RoundManager(engine, outbox, QUICK)
    await manager.configure(round_spec(), Move.START)
    await until(lambda: manager.status().cores and manager.status().cores[0].stopped)
    await manager.stop()
    assert manager.status().cores == ()
    engine.broken_cores = frozenset()
    await manager.configure(round_spec("next"), Move.START)
    await until(lambda: all(core.proved for core in manager.status().cores))
    assert not any(core.stopped for core in manager.status().cores)
    await manager.aclose()


async def test_the_self_check_asks_every_core_and_names_the_one_that_fails() -> None:
    engine = FakeEngine(cores=2)
    await self_check(engine)
    assert [len(calls) for calls in engine.calls_of] == [1, 1]
    engine.broken_cores = frozenset({1})
    with pytest.raises(EngineFault, match="engine core 1: toy core 1 is broken"):
        await self_check(engine)
    engine.broken_cores, engine.chat_cores = frozenset(), frozenset({0})
    with refused(Refusal.CHAT_BUSY, match="engine core 0: chat is busy"):
        await self_check(engine)
    assert engine.leases == 0


async def test_gauges_are_sums_with_a_part_for_each_core() -> None:
    engine = FakeEngine(cores=2)
    await self_check(engine)
    gauges = await engine.gauges()
    assert gauges.forwards == 2
    assert [core.forwards for core in gauges.cores] == [1, 1]
    assert (await FakeEngine().gauges()).cores == ()
