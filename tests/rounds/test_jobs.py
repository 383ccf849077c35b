import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from proofserve.engines.fake import FakeEngine
from proofserve.rounds.batches import NOT_FINITE, artifacts_of
from proofserve.rounds.computation import Computation
from proofserve.rounds.errors import EngineFault, EngineGone, QueueFull, UnknownJob
from proofserve.rounds.jobs import JobQueue
from proofserve.rounds.limits import JobLimits
from proofserve.rounds.records import JobState, Proofs, Verdict
from rounds.doubles import QUICK, MemoryOutbox, computed, job, until, validation_of

pytestmark = pytest.mark.anyio


class Bench:
    def __init__(self, limits: JobLimits = QUICK.jobs) -> None:
        self.now = 0.0
        self.tasks_before = asyncio.all_tasks()
        self.engine = FakeEngine()
        self.outbox = MemoryOutbox()
        self.no_round = asyncio.Event()
        self.no_round.set()
        # Chunk timeouts are real seconds here, expiry follows ``now``.
        clock = asyncio.get_running_loop().time
        computation = Computation(self.engine, self.no_round, limits.chunk_timeout_s, clock)
        self.queue = JobQueue(computation, self.outbox, limits, lambda: self.now)

    def state(self, request_id: str) -> JobState:
        return self.queue.result(request_id).state

    async def ended(self, request_id: str) -> JobState:
        await until(lambda: self.state(request_id) not in (JobState.QUEUED, JobState.RUNNING))
        return self.state(request_id)

    def error(self, request_id: str) -> str:
        return self.queue.result(request_id).error or ""

    async def assert_idle(self) -> None:
        assert self.engine.leases == 0
        assert self.queue.gauges.queued_nonces == 0
        await self.queue.aclose(0.5)
        assert asyncio.all_tasks() == self.tasks_before


async def test_a_job_is_computed_in_chunks() -> None:
    bench = Bench()
    request_id = bench.queue.submit(job(*range(10)))
    assert bench.state(request_id) is JobState.QUEUED
    assert await bench.ended(request_id) is JobState.COMPLETED
    outcome = bench.queue.result(request_id).outcome
    assert isinstance(outcome, Proofs)
    assert outcome.artifacts == artifacts_of(await computed(FakeEngine(), *range(10)))
    assert bench.engine.calls == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert bench.outbox.callbacks == []
    await bench.assert_idle()


async def test_claims_get_a_verdict() -> None:
    bench = Bench()
    batch = await computed(FakeEngine(), 1, 2, 3)
    order = job(1, 2, 3, validation=validation_of(artifacts_of(batch)), url="http://x")
    request_id = bench.queue.submit(order)
    await bench.ended(request_id)
    assert bench.queue.result(request_id).outcome == Verdict(3, 0, (), 1.0, False)
    endpoint, url, body = bench.outbox.callbacks[0]
    assert (endpoint, url) == ("validated", "http://x")
    assert body == {
        "request_id": request_id,
        "block_hash": "block",
        "block_height": 7,
        "public_key": "key",
        "node_id": 1,
        "n_total": 3,
        "n_mismatch": 0,
        "mismatch_nonces": [],
        "p_value": 1.0,
        "fraud_detected": False,
    }
    await bench.assert_idle()


async def test_artifacts_are_called_back() -> None:
    bench = Bench()
    bench.engine.not_finite = frozenset({2})
    request_id = bench.queue.submit(job(1, 2, url="http://x"))
    await bench.ended(request_id)
    endpoint, _, body = bench.outbox.callbacks[0]
    assert endpoint == "generated"
    assert [a["nonce"] for a in body["artifacts"]] == [1]
    assert body["encoding"] == {"dtype": "f16", "k_dim": 12, "endian": "le"}
    assert body["failed"] == [{"nonce": 2, "error": NOT_FINITE}]
    await bench.assert_idle()


async def test_first_come_first_served_whoever_waits() -> None:
    bench = Bench()
    bench.engine.latency_s = 0.001
    first = bench.queue.submit(job(*range(8)))
    second = asyncio.create_task(bench.queue.run(job(10)))
    await asyncio.sleep(0)
    third = bench.queue.submit(job(20))
    assert await bench.ended(third) is JobState.COMPLETED
    assert bench.state(first) is JobState.COMPLETED
    assert second.done()
    assert bench.engine.calls == [(0, 1, 2, 3), (4, 5, 6, 7), (10,), (20,)]
    await second
    await bench.assert_idle()


async def test_a_job_waits_for_the_round_and_shows_queued() -> None:
    bench = Bench()
    bench.no_round.clear()
    request_id = bench.queue.submit(job(1))
    await asyncio.sleep(0.02)
    assert bench.state(request_id) is JobState.QUEUED
    assert bench.engine.calls == []
    bench.no_round.set()
    assert await bench.ended(request_id) is JobState.COMPLETED
    await bench.assert_idle()


async def test_a_round_that_starts_in_between_is_waited_for_without_a_lease() -> None:
    bench = Bench()
    bench.engine.latency_s = 0.02
    request_id = bench.queue.submit(job(*range(8)))
    await until(lambda: bench.engine.calls)
    bench.no_round.clear()
    await until(lambda: bench.engine.leases == 0)
    assert len(bench.engine.calls) == 1
    bench.no_round.set()
    assert await bench.ended(request_id) is JobState.COMPLETED
    assert len(bench.engine.calls) == 2
    await bench.assert_idle()


async def test_the_queue_is_bounded_in_nonces() -> None:
    bench = Bench()
    bench.no_round.clear()
    bench.queue.submit(job(*range(60)))
    waiting = asyncio.create_task(bench.queue.run(job(*range(30))))
    await asyncio.sleep(0)
    for order in (job(*range(11)), job(*range(101))):
        with pytest.raises(QueueFull, match=r"^Queue full: 90 nonces queued, limit is 100$"):
            bench.queue.submit(order)
        with pytest.raises(QueueFull):
            await bench.queue.run(order)
    bench.queue.submit(job(*range(10)))
    bench.no_round.set()
    await waiting
    await until(lambda: bench.queue.gauges.queued_nonces == 0)
    await bench.assert_idle()


async def test_an_engine_fault_fails_the_job_and_not_the_next() -> None:
    bench = Bench()
    bench.engine.faults = 1
    batch = await computed(FakeEngine(), 1)
    order = job(1, validation=validation_of(artifacts_of(batch)), url="http://x")
    first, second = bench.queue.submit(order), bench.queue.submit(order)
    assert await bench.ended(first) is JobState.FAILED
    assert bench.error(first) == "the toy engine was told to fail"
    assert bench.queue.result(first).outcome is None
    assert await bench.ended(second) is JobState.COMPLETED
    assert len(bench.outbox.callbacks) == 1
    await bench.assert_idle()


async def test_an_incomplete_recomputation_is_an_error_and_no_verdict() -> None:
    bench = Bench()
    batch = await computed(FakeEngine(), 1, 2)
    order = job(1, 2, validation=validation_of(artifacts_of(batch)), url="http://x")
    bench.engine.not_finite = frozenset({2})
    request_id = bench.queue.submit(order)
    assert await bench.ended(request_id) is JobState.FAILED
    assert "no verdict is possible: nonce 2" in bench.error(request_id)
    bench.engine.dropped = frozenset({1})
    with pytest.raises(EngineFault, match="other nonces"):
        await bench.queue.run(order)
    assert bench.outbox.callbacks == []
    await bench.assert_idle()


async def test_a_chunk_that_chat_holds_back_for_too_long_is_skipped() -> None:
    bench = Bench()
    bench.engine.deferrals, bench.engine.deferral_s = 10**9, 0.1
    request_id = bench.queue.submit(job(1))
    assert await bench.ended(request_id) is JobState.FAILED
    assert bench.error(request_id).startswith("skipped: chat held a chunk back for more than 0.3 s")
    assert 3 <= len(bench.engine.calls) <= 4
    await bench.assert_idle()


async def test_a_chunk_that_chat_holds_back_briefly_is_asked_for_again() -> None:
    bench = Bench()
    bench.engine.deferrals = 2
    request_id = bench.queue.submit(job(1))
    assert await bench.ended(request_id) is JobState.COMPLETED
    assert bench.engine.calls == [(1,)] * 3
    await bench.assert_idle()


async def test_a_dead_engine_fails_jobs() -> None:
    bench = Bench()
    bench.engine.gone = True
    request_id = bench.queue.submit(job(1))
    assert await bench.ended(request_id) is JobState.FAILED
    with pytest.raises(EngineGone):
        await bench.queue.run(job(1))
    await bench.assert_idle()


async def test_an_unexpected_error_fails_the_job_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()

    async def answer(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    bench.engine.answer = answer  # type: ignore[assignment]
    request_id = bench.queue.submit(job(1))
    assert await bench.ended(request_id) is JobState.FAILED
    assert "secret" not in bench.error(request_id)
    assert "secret" in caplog.text
    await bench.assert_idle()


async def test_results_expire() -> None:
    bench = Bench()
    request_id = bench.queue.submit(job(1))
    await bench.ended(request_id)
    bench.now = 29.9
    assert bench.state(request_id) is JobState.COMPLETED
    bench.now = 30.0
    with pytest.raises(UnknownJob, match=f"^Request {request_id} not found$"):
        bench.queue.result(request_id)
    await bench.assert_idle()


async def test_expired_results_are_forgotten_although_nobody_asks() -> None:
    bench = Bench(replace(QUICK.jobs, result_ttl_s=0.01))
    request_id = bench.queue.submit(job(1))
    await until(lambda: bench.queue.gauges.queued_nonces == 0)
    await asyncio.sleep(0.05)
    # The clock of the double stands still, so it was the timer that forgot.
    with pytest.raises(UnknownJob):
        bench.queue.result(request_id)
    await bench.assert_idle()


async def test_cancelling_reaches_submitted_jobs_only() -> None:
    bench = Bench()
    done = bench.queue.submit(job(1))
    await bench.ended(done)
    bench.engine.latency_s = 0.05
    running = bench.queue.submit(job(2))
    await until(lambda: bench.state(running) is JobState.RUNNING)
    waiting = asyncio.create_task(bench.queue.run(job(3)))
    await asyncio.sleep(0)
    queued = bench.queue.submit(job(4))
    await bench.queue.cancel(0.5)
    assert bench.state(running) is JobState.CANCELLED
    assert bench.state(queued) is JobState.CANCELLED
    assert bench.state(done) is JobState.COMPLETED
    assert isinstance(await waiting, Proofs)
    await bench.assert_idle()


async def test_a_job_cancelled_before_its_first_step_leaves_the_line() -> None:
    bench = Bench()
    request_id = bench.queue.submit(job(1))
    await bench.queue.cancel(0.5)
    assert bench.state(request_id) is JobState.CANCELLED
    assert isinstance(await asyncio.wait_for(bench.queue.run(job(2)), 1), Proofs)
    await bench.assert_idle()


async def test_a_caller_who_leaves_takes_the_job_along() -> None:
    bench = Bench()
    bench.engine.latency_s = 60
    running = asyncio.create_task(bench.queue.run(job(1)))
    await until(lambda: bench.engine.leases)
    queued = asyncio.create_task(bench.queue.run(job(2)))
    await asyncio.sleep(0)
    for task in (queued, running):
        task.cancel()
    await asyncio.wait({queued, running})
    assert bench.engine.calls == [(1,)]
    await bench.assert_idle()


async def test_a_job_completes_only_after_its_callback_is_stored() -> None:
    bench = Bench()
    bench.outbox.full = "disk full"
    first = bench.queue.submit(job(1, url="http://x"))
    await until(lambda: bench.outbox.attempts >= 3)
    assert bench.state(first) is JobState.RUNNING
    # The engine is not kept waiting by it.
    assert isinstance(await bench.queue.run(job(2)), Proofs)
    bench.outbox.full = None
    assert await bench.ended(first) is JobState.COMPLETED
    assert len(bench.outbox.callbacks) == 1
    await bench.assert_idle()


@pytest.mark.parametrize("full", [None, "disk full"])
async def test_cancelled_while_its_callback_is_being_stored_a_job_is_one_or_the_other(
    full: str | None,
) -> None:
    bench = Bench()
    bench.outbox.full, bench.outbox.latency_s = full, 0.05
    request_id = bench.queue.submit(job(1, url="http://x"))
    await until(lambda: bench.outbox.attempts)
    await bench.queue.cancel(0.5)
    expected = JobState.CANCELLED if full else JobState.COMPLETED
    assert bench.state(request_id) is expected
    assert len(bench.outbox.callbacks) == (expected is JobState.COMPLETED)
    await bench.assert_idle()


async def test_cancelling_does_not_wait_for_ever_for_an_outbox_that_hangs() -> None:
    bench = Bench()

    async def enqueue(endpoint: str, url: str, body: Mapping[str, Any]) -> None:
        bench.outbox.attempts += 1
        await asyncio.sleep(60)

    bench.outbox.enqueue = enqueue  # type: ignore[method-assign]
    request_id = bench.queue.submit(job(1, url="http://x"))
    await until(lambda: bench.outbox.attempts)
    await bench.queue.cancel(0.05)
    assert bench.state(request_id) is JobState.CANCELLED
    await bench.assert_idle()
