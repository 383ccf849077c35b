import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from proofserve.outbox.store import SqliteOutbox
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.rounds.records import RoundProgress, StoredResult
from support.pace import PACE

from .support import a_spec, artifacts, progress_of
from .writer import BATCH

pytestmark = pytest.mark.anyio


async def test_results_failures_and_progress_are_read_back(store: SqliteOutbox) -> None:
    assert await store.open_round(a_spec()) == RoundProgress()
    await store.record("r1", 3, artifacts(3, 2**63 - 1), {11: "not finite"})
    assert await store.results(0, 10) == [
        StoredResult(1, "r1", 3, "vector3", None),
        StoredResult(2, "r1", 2**63 - 1, f"vector{2**63 - 1}", None),
        StoredResult(3, "r1", 11, None, "not finite"),
    ]
    assert await progress_of(store, "r1") == RoundProgress(3, found=2, failed=1)
    gauges = await store.gauges()
    assert (gauges.results, gauges.pending, gauges.delivered, gauges.expired) == (3, 0, 0, 0)
    assert (gauges.oldest_pending_s, gauges.last_error) == (0.0, None)


async def test_results_are_paged_by_seq_across_rounds(store: SqliteOutbox) -> None:
    await store.open_round(a_spec("r1"))
    await store.open_round(a_spec("r2"))
    for index in range(5):
        await store.record("r1", index + 1, artifacts(index), {})
        await store.record("r2", index + 1, artifacts(index), {})
    seen: list[StoredResult] = []
    while page := await store.results(seen[-1].seq if seen else 0, 3):
        assert len(page) <= 3
        seen += page
    assert [row.seq for row in seen] == list(range(1, 11))
    assert [row.round_id for row in seen] == ["r1", "r2"] * 5
    assert await store.results(0, 0) == []
    assert await store.results(0, -1) == []


async def test_all_rows_are_there_after_reopening(path: Path) -> None:
    async with await SqliteOutbox.open(path) as store:
        await store.open_round(a_spec())
        await store.record("r1", 2, artifacts(3, 7), {})
        before = await store.results(0, 10)
    async with await SqliteOutbox.open(path) as store:
        assert await store.results(0, 10) == before
        assert await progress_of(store, "r1") == RoundProgress(2, found=2)


async def test_a_repeated_call_stores_nothing_twice(store: SqliteOutbox) -> None:
    await store.open_round(a_spec())
    await store.record("r1", 3, artifacts(3, 7), {11: "not finite"})
    await store.record("r1", 3, artifacts(3, 7), {11: "not finite"})
    await store.record("r1", 2, [], {})
    assert [row.nonce for row in await store.results(0, 10)] == [3, 7, 11]
    assert await progress_of(store, "r1") == RoundProgress(3, found=2, failed=1)
    assert (await store.gauges()).results == 3


async def test_a_round_is_reopened_only_as_the_same_order(store: SqliteOutbox) -> None:
    await store.open_round(a_spec(url="http://a"))
    await store.record("r1", 1, artifacts(3), {})
    await store.close_round("r1")
    assert await store.open_round(a_spec(url="http://a")) == RoundProgress(1, found=1)
    for other in (a_spec(url="http://b"), a_spec(url="http://a", k_dim=13)):
        with pytest.raises(ValueError, match="other parameters"):
            await store.open_round(other)
    await store.open_round(replace(a_spec(url="http://b"), round_id="r2"))


async def test_an_unknown_round_is_a_value_error(store: SqliteOutbox) -> None:
    for call in (store.record("r9", 1, artifacts(3), {}), store.close_round("r9")):
        with pytest.raises(ValueError, match="'r9' was never opened"):
            await call
    assert await store.results(0, 10) == []


async def test_a_cancelled_record_still_wakes_the_sender(store: SqliteOutbox) -> None:
    await store.open_round(a_spec(url="http://a"))
    call = asyncio.create_task(store.record("r1", 1, artifacts(3), {}))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert store.news.is_set()


async def test_recording_a_batch_is_cheap(store: SqliteOutbox) -> None:
    await store.open_round(a_spec(url="http://a"))
    took = []
    for index in range(0, 640, 32):
        batch = artifacts(*range(index, index + 32))
        started = time.perf_counter()
        await store.record("r1", index + 32, batch, {})
        took.append(time.perf_counter() - started)
    took.sort()
    print(f"record of 32: median {took[10] * 1e3:.2f} ms, slowest {took[-1] * 1e3:.2f} ms")
    # A forward takes far longer; a slow shared disk must not fail this.
    assert took[10] < 1.0 * PACE


def test_sigkill_loses_no_reported_result(path: Path) -> None:
    writer = [sys.executable, str(Path(__file__).with_name("writer.py")), str(path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    reported = 0
    for calls in (40, 25):
        with subprocess.Popen(writer, env=env, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _ in range(calls):
                reported = int(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            # Lines that the process printed before it died count too.
            reported = max([reported, *(int(line) for line in child.stdout)])
            assert child.wait() == -signal.SIGKILL
        asyncio.run(_check_after_kill(path, reported))


async def _check_after_kill(path: Path, reported: int) -> None:
    async with await SqliteOutbox.open(path) as store:
        rows = await store.results(0, 10**9)
        progress = await progress_of(store, "r1")
    # One more call may be stored without a printed line, but never half a call.
    stored = progress.next_index
    assert stored in (reported, reported + BATCH)
    assert [row.nonce for row in rows] == list(range(stored))
    assert [row.nonce for row in rows if row.error] == list(range(BATCH - 1, stored, BATCH))
    calls = stored // BATCH
    assert (progress.found, progress.failed) == (stored - calls, calls)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MB: SQLite's own page limit would not include the WAL."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system here; the file size limit below covers it")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


async def test_a_full_disk_refuses_the_whole_call_and_accepts_it_later(small_disk: Path) -> None:
    async with await SqliteOutbox.open(small_disk / "outbox.sqlite") as store:
        await store.open_round(a_spec())
        (small_disk / "ballast").write_bytes(b"x" * 600_000)
        stored = await _fill(store)
        with pytest.raises(OutboxUnavailable, match=r"disk is full \(SQLITE_FULL\)"):
            await store.record("r1", stored + 100, _batch(stored), {})
        await _check_whole(store, stored)
        (small_disk / "ballast").unlink()
        await store.record("r1", stored + 100, _batch(stored), {})
        await _check_whole(store, stored + 100)


async def test_a_failing_write_refuses_the_whole_call_and_accepts_it_later(path: Path) -> None:
    # A limit on the size of files makes the kernel fail the write itself, as a bad disk does,
    # and needs no rights. Python ignores the signal that comes with it.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with await SqliteOutbox.open(path) as store:
        await store.open_round(a_spec())
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
        try:
            stored = await _fill(store)
            await _check_whole(store, stored)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        await store.record("r1", stored + 100, _batch(stored), {})
        await _check_whole(store, stored + 100)
    async with await SqliteOutbox.open(path) as store:
        await _check_whole(store, stored + 100)


async def _fill(store: SqliteOutbox) -> int:
    """Record until the disk is full; return the number of stored results."""
    for stored in range(0, 100_000, 100):
        try:
            await store.record("r1", stored + 100, _batch(stored), {})
        except OutboxUnavailable:
            return stored
    raise AssertionError("the disk never filled")


def _batch(first: int) -> list:
    return artifacts(*range(first, first + 100))


async def _check_whole(store: SqliteOutbox, stored: int) -> None:
    assert stored > 0
    assert [row.nonce for row in await store.results(0, 10**6)] == list(range(stored))
    assert await progress_of(store, "r1") == RoundProgress(stored, found=stored)
    assert (await store.gauges()).results == stored


async def test_a_probe_writes_and_changes_nothing(store: SqliteOutbox, path: Path) -> None:
    await store.open_round(a_spec())
    log = path.with_name(path.name + "-wal")
    before = log.stat().st_size
    await store.probe()
    assert log.stat().st_size > before
    assert await progress_of(store, "r1") == RoundProgress()
    await store.database.read(lambda c: c.execute("PRAGMA query_only = ON"))
    with pytest.raises(OutboxUnavailable, match="readonly"):
        await store.probe()
