import asyncio
import itertools
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from proofserve.rounds.computation import NOT_FINITE, artifacts_of
from proofserve.rounds.errors import EngineFault, EngineGone, Refusal, Refused
from proofserve.rounds.records import JobState, Proofs, Verdict
from rounds.doubles import QUICK, claims_of, computed, job
from rounds.job_bench import JobBench
from support.fake_engine import FakeEngine
from support.pace import until
from support.refusals import refused

pytestmark = pytest.mark.anyio


async def test_a_job_is_computed_in_chunks() -> None:
    bench = JobBench()
    request_id = bench.queue.submit(job(*range(10)))
    assert bench.state(request_id) is JobState.QUEUED
    assert await bench.ended(request_id) is JobState.COMPLETED
    outcome = bench.outcome(request_id)
    assert isinstance(outcome, Proofs)
    assert outcome.artifacts == artifacts_of(await computed(FakeEngine(), *range(10)))
    assert bench.engine.calls == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert bench.outbox.callbacks == []
    await bench.assert_idle()


async def test_claims_get_a_verdict() -> None:
    bench = JobBench()
    batch = await computed(FakeEngine(), 1, 2, 3)
    order = job(1, 2, 3, claims=claims_of(artifacts_of(batch)), url="http://x")
    request_id = bench.queue.submit(order)
    await bench.ended(request_id)
    assert bench.outcome(request_id) == Verdict(3, 0, (), 1.0, False)
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
    bench = JobBench()
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
    bench = JobBench()
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
    bench = JobBench()
    bench.no_round.clear()
    request_id = bench.queue.submit(job(1))
    await asyncio.sleep(0.02)
    assert bench.state(request_id) is JobState.QUEUED
    assert bench.engine.calls == []
    bench.no_round.set()
    assert await bench.ended(request_id) is JobState.COMPLETED
    await bench.assert_idle()


async def test_a_round_that_starts_in_between_is_waited_for_without_a_lease() -> None:
    bench = JobBench()
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
    bench = JobBench()
    bench.no_round.clear()
    bench.queue.submit(job(*range(60)))
    waiting = asyncio.create_task(bench.queue.run(job(*range(30))))
    await asyncio.sleep(0)
    for order in (job(*range(11)), job(*range(101))):
        with refused(Refusal.QUEUE_FULL, match=r"^Queue full: 90 nonces queued, limit is 100$"):
            bench.queue.submit(order)
        with refused(Refusal.QUEUE_FULL):
            await bench.queue.run(order)
    bench.queue.submit(job(*range(10)))
    bench.no_round.set()
    await waiting
    await until(lambda: bench.admission.gauges.queued_nonces == 0)
    await bench.assert_idle()


async def test_an_engine_fault_fails_the_job_and_not_the_next() -> None:
    bench = JobBench()
    bench.engine.faults = 1
    batch = await computed(FakeEngine(), 1)
    order = job(1, claims=claims_of(artifacts_of(batch)), url="http://x")
    first, second = bench.queue.submit(order), bench.queue.submit(order)
    assert await bench.ended(first) is JobState.FAILED
    assert bench.error(first) == "the toy engine was told to fail"
    assert bench.outcome(first) is None
    assert await bench.ended(second) is JobState.COMPLETED
    assert len(bench.outbox.callbacks) == 1
    await bench.assert_idle()


async def test_an_incomplete_recomputation_is_an_error_and_no_verdict() -> None:
    bench = JobBench()
    batch = await computed(FakeEngine(), 1, 2)
    order = job(1, 2, claims=claims_of(artifacts_of(batch)), url="http://x")
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
    # Each look at the clock finds a tenth of a second more.
    ticks = itertools.count()
    bench = JobBench(replace(QUICK, chunk_timeout_s=0.3), lambda: next(ticks) * 0.1)
    bench.engine.deferrals, bench.engine.deferral_s = 10**9, 0.001
    request_id = bench.queue.submit(job(1))
    assert await bench.ended(request_id) is JobState.FAILED
    assert bench.error(request_id).startswith("skipped: chat delayed a chunk for more than 0.3 s")
    assert 3 <= len(bench.engine.calls) <= 4
    await bench.assert_idle()


async def test_a_chunk_that_chat_holds_back_briefly_is_asked_for_again() -> None:
    bench = JobBench()
    bench.engine.deferrals = 2
    request_id = bench.queue.submit(job(1))
    assert await bench.ended(request_id) is JobState.COMPLETED
    assert bench.engine.calls == [(1,)] * 3
    await bench.assert_idle()


async def test_a_dead_engine_fails_jobs() -> None:
    bench = JobBench()
    bench.engine.gone = True
    request_id = bench.queue.submit(job(1))
    assert await bench.ended(request_id) is JobState.FAILED
    with pytest.raises(EngineGone):
        await bench.queue.run(job(1))
    await bench.assert_idle()


async def test_an_unexpected_error_fails_the_job_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = JobBench()

    async def answer(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    bench.engine.answer = answer  # type: ignore[assignment]
    request_id = bench.queue.submit(job(1))
    assert await bench.ended(request_id) is JobState.FAILED
    assert "secret" not in bench.error(request_id)
    assert "secret" in caplog.text
    await bench.assert_idle()


async def test_results_expire() -> None:
    bench = JobBench(replace(QUICK, result_ttl_s=0.01))
    request_id = bench.queue.submit(job(1))
    await until(lambda: bench.admission.gauges.queued_nonces == 0)
    await asyncio.sleep(0.05)
    with refused(Refusal.UNKNOWN_JOB, match=f"^Request {request_id} not found$"):
        bench.queue.result(request_id)
    await bench.assert_idle()


async def test_the_oldest_results_make_room_by_jobs() -> None:
    bench = JobBench(replace(QUICK, max_kept_jobs=3))
    ids = []
    for nonce in range(5):
        ids.append(bench.queue.submit(job(nonce)))
        assert await bench.ended(ids[-1]) is JobState.COMPLETED
    for gone in ids[:2]:
        with refused(Refusal.UNKNOWN_JOB):
            bench.queue.result(gone)
    assert [bench.state(kept) for kept in ids[2:]] == [JobState.COMPLETED] * 3
    await bench.assert_idle()


async def test_the_oldest_results_make_room_by_nonces() -> None:
    bench = JobBench(replace(QUICK, max_kept_nonces=10))
    first, second, third = (bench.queue.submit(job(*range(4))) for _ in range(3))
    assert await bench.ended(third) is JobState.COMPLETED
    with refused(Refusal.UNKNOWN_JOB):
        bench.queue.result(first)
    assert bench.state(second) is JobState.COMPLETED
    # The newest result stays at any size: its client had no time to read it.
    large = bench.queue.submit(job(*range(20)))
    assert await bench.ended(large) is JobState.COMPLETED
    for gone in (second, third):
        with refused(Refusal.UNKNOWN_JOB):
            bench.queue.result(gone)
    await bench.assert_idle()


async def test_cancelled_jobs_do_not_pile_up() -> None:
    bench = JobBench(replace(QUICK, max_kept_jobs=3))
    bench.no_round.clear()
    ids = []
    for _ in range(50):
        ids += [bench.queue.submit(job(1, 2)) for _ in range(4)]
        await bench.queue.cancel(0.5)
    known = 0
    for request_id in ids:
        with suppress(Refused):
            known += bench.state(request_id) is JobState.CANCELLED
    assert known == 3
    await bench.assert_idle()
