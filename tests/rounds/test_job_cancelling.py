"""How submitted jobs end before their time, and when they count as done."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from proofserve.rounds.records import JobState, Proofs
from rounds.doubles import job
from rounds.job_bench import JobBench
from support.pace import until

pytestmark = pytest.mark.anyio


async def test_cancelling_reaches_submitted_jobs_only() -> None:
    bench = JobBench()
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
    bench = JobBench()
    request_id = bench.queue.submit(job(1))
    await bench.queue.cancel(0.5)
    assert bench.state(request_id) is JobState.CANCELLED
    assert isinstance(await asyncio.wait_for(bench.queue.run(job(2)), 30), Proofs)
    await bench.assert_idle()


async def test_a_caller_who_leaves_takes_the_job_along() -> None:
    bench = JobBench()
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
    bench = JobBench()
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
    bench = JobBench()
    bench.outbox.full, bench.outbox.latency_s = full, 0.05
    request_id = bench.queue.submit(job(1, url="http://x"))
    await until(lambda: bench.outbox.attempts)
    await bench.queue.cancel(0.5)
    expected = JobState.CANCELLED if full else JobState.COMPLETED
    assert bench.state(request_id) is expected
    assert len(bench.outbox.callbacks) == (expected is JobState.COMPLETED)
    await bench.assert_idle()


async def test_cancelling_does_not_wait_for_ever_for_an_outbox_that_hangs() -> None:
    bench = JobBench()

    async def enqueue(endpoint: str, url: str, body: Mapping[str, Any]) -> None:
        bench.outbox.attempts += 1
        await asyncio.sleep(60)

    bench.outbox.enqueue = enqueue  # type: ignore[method-assign]
    request_id = bench.queue.submit(job(1, url="http://x"))
    await until(lambda: bench.outbox.attempts)
    await bench.queue.cancel(0.05)
    assert bench.state(request_id) is JobState.CANCELLED
    await bench.assert_idle()
