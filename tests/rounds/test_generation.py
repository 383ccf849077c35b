import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import scheme
from proofserve.rounds.computation import NOT_FINITE
from proofserve.rounds.generation import Generation
from proofserve.rounds.records import Limits, RoundProgress, RoundSpec, Target
from proofserve.rounds.status import Counters, NodeTotals
from rounds.doubles import QUICK, WORK, MemoryOutbox, round_spec
from support.fake_engine import FakeEngine
from support.pace import until

pytestmark = pytest.mark.anyio


class Bench:
    """One generation with its doubles; the engine takes a millisecond a call."""

    def __init__(self, limits: Limits = QUICK, spec: RoundSpec | None = None) -> None:
        self.engine = FakeEngine()
        self.engine.latency_s = 0.001
        self.outbox = MemoryOutbox()
        self.spec = spec or round_spec()
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
            await self.round.close(self.spec)

    def assert_sound(self) -> None:
        """Nothing lost, nothing twice, in lane order, the lease back and the round closed."""
        count = len(self.outbox.rows)
        assert self.outbox.nonces == list(self.spec.lane.batch(0, count))
        assert self.outbox.progress == sorted(set(self.outbox.progress))
        assert self.outbox.progress[-1:] == ([count] if count else [])
        stats = self.counters.read()
        assert stats.total_processed + stats.failed == count
        assert self.engine.leases == 0
        assert self.outbox.closed == [self.spec.round_id]


async def test_results_come_in_lane_order_until_it_is_stopped() -> None:
    bench = Bench()
    async with bench.running():
        await until(lambda: len(bench.outbox.rows) >= 40)
    bench.assert_sound()
    assert bench.round.error is None
    assert bench.counters.read().nonces_per_second > 0
    calls = len(bench.engine.calls)
    await asyncio.sleep(0.02)
    assert len(bench.engine.calls) == calls


async def test_the_engine_is_asked_ahead_but_no_further_than_the_depth() -> None:
    bench = Bench(replace(QUICK, depth=3))
    bench.engine.latency_s = 60
    async with bench.running():
        await until(lambda: len(bench.engine.calls) == 3)
        await asyncio.sleep(0.02)
        assert len(bench.engine.calls) == 3
    bench.assert_sound()


async def test_the_engine_does_not_wait_for_the_disk() -> None:
    bench = Bench()
    bench.outbox.held = asyncio.Event()
    async with bench.running():
        # Eight batches may wait, so the first transaction costs no forward.
        await until(lambda: len(bench.engine.calls) >= 7)
        assert bench.outbox.progress == []
        bench.outbox.held.set()
        await until(lambda: len(bench.outbox.progress) >= 2)
    bench.assert_sound()
    # What finished meanwhile shared one transaction.
    assert bench.outbox.progress[1] - bench.outbox.progress[0] > bench.spec.batch_size


async def test_a_disk_that_is_too_slow_holds_the_engine_back() -> None:
    bench = Bench(replace(QUICK, flush_timeout_s=0.05))
    bench.outbox.latency_s = 60
    async with bench.running():
        most = QUICK.max_unrecorded + QUICK.depth
        await until(lambda: len(bench.engine.calls) == most)
        await asyncio.sleep(0.1)
        assert len(bench.engine.calls) == most
    assert bench.outbox.rows == []
    # Eight batches of four: what finished and could not be stored is said.
    assert bench.round.error is not None
    assert "32 finished nonces could not be stored (outbox: no answer)" in bench.round.error
    assert "no answer when the round was closed" in bench.round.error


async def test_stopping_stores_what_is_finished() -> None:
    bench = Bench()
    bench.outbox.held = asyncio.Event()
    async with bench.running():
        await until(lambda: len(bench.engine.calls) >= 7)
        assert bench.outbox.rows == []
        bench.outbox.held.set()
    bench.assert_sound()
    assert len(bench.outbox.rows) >= 5 * bench.spec.batch_size
    assert bench.round.error is None


async def test_a_deferred_call_is_asked_again_for_the_same_nonces() -> None:
    bench = Bench()
    bench.engine.deferrals = 5
    async with bench.running():
        await until(lambda: len(bench.outbox.rows) >= 16)
    bench.assert_sound()
    assert bench.counters.read().deferred_calls == 5
    assert bench.engine.calls.count(bench.spec.lane.batch(0, 4)) >= 2


async def test_endless_chat_costs_few_calls_and_can_be_stopped() -> None:
    bench = Bench()
    bench.engine.deferrals = 10**9
    async with bench.running():
        await asyncio.sleep(0.3)
        # Two in flight, 50 ms each at least.
        assert 4 <= len(bench.engine.calls) <= 14
    bench.assert_sound()
    assert bench.outbox.rows == []


async def test_stopped_while_deferred_nothing_runs_afterwards() -> None:
    bench = Bench()
    bench.engine.deferrals, bench.engine.deferral_s = 10**9, 60
    async with bench.running():
        await until(lambda: bench.engine.calls)
    bench.engine.deferrals = 0
    calls = len(bench.engine.calls)
    await asyncio.sleep(0.05)
    assert len(bench.engine.calls) == calls
    bench.assert_sound()


async def test_a_nonce_without_a_finite_row_is_recorded_with_its_reason() -> None:
    bench = Bench()
    lane = bench.spec.lane
    bench.engine.not_finite = frozenset({lane.nonce(1), *lane.batch(4, 4)})
    async with bench.running():
        await until(lambda: len(bench.outbox.rows) >= 12)
    failed = {row.nonce: row.error for row in bench.outbox.rows if row.error is not None}
    assert failed == dict.fromkeys(bench.engine.not_finite, NOT_FINITE)
    assert all((row.value is None) != (row.error is None) for row in bench.outbox.rows)
    assert sorted(bench.outbox.nonces) == list(lane.batch(0, len(bench.outbox.rows)))
    assert bench.counters.read().failed == 5


async def test_a_full_outbox_pauses_the_round_and_loses_nothing() -> None:
    bench = Bench()
    async with bench.running():
        await until(lambda: len(bench.outbox.rows) >= 8)
        bench.outbox.full = "disk full"
        await until(lambda: bench.round.paused_reason)
        assert bench.round.paused_reason == "outbox: disk full"
        stored, attempts = len(bench.outbox.rows), bench.outbox.attempts
        assert bench.counters.read().total_processed == stored
        await asyncio.sleep(0.1)
        assert len(bench.outbox.rows) == stored
        assert bench.outbox.attempts - attempts <= 12
        bench.outbox.full = None
        await until(lambda: len(bench.outbox.rows) >= stored + 40)
        assert bench.round.paused_reason is None
    bench.assert_sound()


async def test_stopped_while_the_outbox_is_full_it_ends_and_says_what_is_missing() -> None:
    bench = Bench()
    async with bench.running():
        bench.outbox.full = "disk full"
        await until(lambda: bench.round.paused_reason)
    assert bench.outbox.rows == []
    assert bench.round.error is not None
    assert "finished nonces could not be stored (outbox: disk full)" in bench.round.error


async def test_a_faulty_batch_is_tried_again() -> None:
    bench = Bench()
    bench.engine.faults = 2
    async with bench.running():
        await until(lambda: bench.round.paused_reason)
        assert bench.round.paused_reason == "engine: the toy engine was told to fail"
        await until(lambda: len(bench.outbox.rows) >= 16)
        assert bench.round.paused_reason is None
    bench.assert_sound()
    assert bench.round.error is None
    assert bench.counters.read().faults == 2


async def test_a_batch_that_never_succeeds_ends_the_round_and_keeps_what_was_stored() -> None:
    bench = Bench()
    async with bench.running() as task:
        await until(lambda: len(bench.outbox.rows) >= 8)
        bench.engine.faults = 10**9
        began = time.monotonic()
        await asyncio.wait_for(asyncio.shield(task), 5)
        # The pauses after the first and the second fault.
        assert time.monotonic() - began >= 0.03 - 0.005
    bench.assert_sound()
    assert bench.round.error is not None
    assert bench.round.error.startswith("3 faults in a row")
    assert len(bench.outbox.rows) >= 8


async def test_a_dead_engine_ends_the_round_at_once() -> None:
    bench = Bench(replace(QUICK, fault_backoff_s=(60.0,)))
    async with bench.running() as task:
        await until(lambda: len(bench.outbox.rows) >= 8)
        bench.engine.gone = True
        await asyncio.wait_for(asyncio.shield(task), 5)
    bench.assert_sound()
    assert bench.round.error == "the toy engine is dead"


async def test_a_lane_ends_with_its_last_whole_batch() -> None:
    bench = Bench(spec=round_spec(lane=NonceLane(0, 2**31, 0, 2**29)))
    async with bench.running() as task:
        await asyncio.wait_for(asyncio.shield(task), 5)
    bench.assert_sound()
    assert len(bench.outbox.rows) == 8
    assert bench.round.error is not None
    assert "the lane ends" in bench.round.error


async def test_an_unexpected_error_ends_the_round_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()

    async def record(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    bench.outbox.record = record  # type: ignore[method-assign]
    async with bench.running() as task:
        await asyncio.wait_for(asyncio.shield(task), 5)
    assert bench.round.error is not None
    assert bench.round.error.startswith("internal error (ZeroDivisionError)")
    assert "secret" not in bench.round.error
    assert "secret" in caplog.text
    assert bench.engine.leases == 0
    assert bench.outbox.closed == ["round"]


async def test_an_outer_cancellation_leaves_nothing_running() -> None:
    bench, before = Bench(), asyncio.all_tasks()
    task = asyncio.create_task(bench.round.run(bench.spec, RoundProgress()))
    await until(lambda: bench.outbox.rows)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    await until(lambda: bench.engine.leases == 0)
    assert asyncio.all_tasks() == before


LOGGING = replace(QUICK, log_interval_s=0.05)


def progress_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "nonces/s" in r.getMessage()]


async def test_a_running_round_logs_its_progress(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "proofserve")
    bench = Bench(LOGGING)

    def counts() -> list[int]:
        return [int(line.split()[2]) for line in progress_lines(caplog)]

    async with bench.running():
        await bench.outbox.enqueue("generated", "http://receiver", {})
        await until(lambda: len(set(counts()) - {0}) >= 2)
    shape = (
        r"round round: \d+ nonces, \d+\.\d nonces/s, \d+ valid, held back by nothing,"
        r" 1 callbacks pending"
    )
    for line in progress_lines(caplog):
        assert re.fullmatch(shape, line)
    assert counts() == sorted(counts())
    count = len(progress_lines(caplog))
    await asyncio.sleep(3 * LOGGING.log_interval_s)
    assert len(progress_lines(caplog)) == count


async def test_the_progress_line_names_chat_and_the_outbox(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "proofserve")
    bench = Bench(LOGGING)
    bench.engine.deferrals = 10_000
    async with bench.running():
        await until(lambda: any("held back by chat" in line for line in progress_lines(caplog)))
        bench.engine.deferrals = 0
        bench.outbox.full = "database or disk is full"
        text = "held back by outbox: database or disk is full, unknown callbacks pending"
        await until(lambda: any(text in line for line in progress_lines(caplog)))
        bench.outbox.full = None


async def test_the_progress_line_counts_winners_of_a_distance_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "proofserve")
    spec = round_spec(work=replace(WORK, scheme=scheme("distance-v1")), target=Target(2.0))
    async with Bench(LOGGING, spec).running():
        await until(lambda: any(" found, held back" in line for line in progress_lines(caplog)))
