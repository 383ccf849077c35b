"""Finished answers become signed receipts in a chained log, in a real SQLite file."""

import asyncio
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outbox.support import running_target, sending
from proofserve.outbox.planning import CallbackPolicy
from proofserve.outbox.sender import CallbackSender
from proofserve.outbox.store import SqliteOutbox
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import (
    Receipt,
    Sampling,
    SigningKey,
    require_chain,
    token_hash,
)
from proofserve.rounds.errors import Refusal, Refused
from proofserve.rounds.receipts import ReceiptService
from proofserve.wire.signed import signed_entry
from support.fake_engine import TOY_ENGINE_INFO, TOY_FACTS, FakeEngine
from support.pace import until
from support.refusals import refused

from .support import an_answer, asked_for, check_log, check_receipt, logged, running, waiting

pytestmark = pytest.mark.anyio


async def test_an_answer_has_a_receipt_that_a_validator_accepts(
    store: SqliteOutbox, engine: FakeEngine
) -> None:
    async with running(store, engine) as service:
        engine.answers.put_nowait(an_answer(sampling=Sampling(temperature=1.0, top_k=5)))
        await logged(service, 1)
        (signed,) = await service.of_response("chatcmpl-1")
        check_receipt(signed)
        assert signed.public_key == service.public_key
        receipt = signed.receipt
        assert receipt.model == "toy"
        assert receipt.weights_digest == TOY_FACTS.weights_digest
        assert receipt.prompt_sha256 == token_hash([1, 2, 3])
        assert (receipt.prompt_tokens, receipt.output_tokens) == (3, 3)
        assert receipt.sampling == Sampling(temperature=1.0, top_k=5)
        assert dict(receipt.versions) == {"vllm": "none"}
        assert await check_log(service) == 1


async def test_choices_are_in_order_and_each_has_its_path(
    store: SqliteOutbox, engine: FakeEngine
) -> None:
    async with running(store, engine) as service:
        for choice in (2, 0, 1):
            engine.answers.put_nowait(an_answer("chatcmpl-n", choice))
        for n in range(6):
            engine.answers.put_nowait(an_answer(f"chatcmpl-other-{n}"))
        await logged(service, 9)
        found = await service.of_response("chatcmpl-n")
        assert [each.receipt.choice for each in found] == [0, 1, 2]
        for each in found:
            check_receipt(each)


async def test_a_second_receipt_for_an_id_is_refused_and_counted(
    store: SqliteOutbox, engine: FakeEngine
) -> None:
    async with running(store, engine) as service:
        engine.answers.put_nowait(an_answer("chatcmpl-x"))
        engine.answers.put_nowait(an_answer("chatcmpl-x", prompt_ids=(9, 9)))
        await logged(service, 1)
        engine.answers.put_nowait(an_answer("chatcmpl-x", prompt_ids=(4,)))
        engine.answers.put_nowait(an_answer("chatcmpl-y"))
        await logged(service, 2)
        (signed,) = await service.of_response("chatcmpl-x")
        assert signed.receipt.prompt_sha256 == token_hash([1, 2, 3])
        gauges = await service.gauges()
        assert (gauges.stored, dict(gauges.without)) == (2, {"repeated_id": 2})


async def test_storing_the_same_receipt_again_changes_nothing(
    store: SqliteOutbox, engine: FakeEngine
) -> None:
    """So it is after a call that was cancelled although the file has its receipts."""
    async with running(store, engine) as service:
        engine.answers.put_nowait(an_answer())
        await logged(service, 1)
        (signed,) = await service.of_response("chatcmpl-1")
        again = (signed, signed.receipt.digest)
        assert await store.receipts.add([again], {}) == 0
        gauges = await service.gauges()
        assert (gauges.stored, dict(gauges.without)) == (1, {})


async def test_a_digest_is_made_once(
    store: SqliteOutbox, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    plain = Receipt.digest.fget  # type: ignore[attr-defined]

    def counted(receipt: Receipt) -> bytes:
        made.append(receipt.response_id)
        return plain(receipt)  # type: ignore[no-any-return]

    monkeypatch.setattr(Receipt, "digest", property(counted))
    async with running(store, engine) as service:
        engine.answers.put_nowait(an_answer())
        await logged(service, 1)
        await service.of_response("chatcmpl-1")
    assert made == ["chatcmpl-1"]


async def test_a_receipt_that_would_read_back_with_another_digest_is_not_stored(
    store: SqliteOutbox, engine: FakeEngine
) -> None:
    async with running(store, engine) as service:
        engine.answers.put_nowait(an_answer())
        await logged(service, 1)
        (signed,) = await service.of_response("chatcmpl-1")
        # 1 equals 1.0, and is another text.
        sampling = replace(signed.receipt.sampling, top_p=1)
        other = replace(signed.receipt, response_id="chatcmpl-2", sampling=sampling)
        new = (replace(signed, receipt=other), other.digest)
        assert await store.receipts.add([new], {}) == 0
        gauges = await service.gauges()
        assert (gauges.stored, dict(gauges.without)) == (1, {"invalid": 1})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sketches": None}, "no_sketches"),
        ({"sketches": b"\0" * 10}, "invalid"),
        ({"output_ids": (6, -1, 8)}, "invalid"),
        ({"prompt_ids": (2**32,)}, "invalid"),
        ({"sampling": Sampling(temperature=float("nan"))}, "invalid"),
        ({"sampling": Sampling(top_k=-1)}, "invalid"),
        ({"response_id": "\ud800"}, "invalid"),
        ({"created_ms": -5}, "invalid"),
    ],
)
async def test_an_answer_without_a_receipt_is_counted_with_its_reason(
    store: SqliteOutbox, engine: FakeEngine, changes: dict[str, Any], reason: str
) -> None:
    async with running(store, engine) as service:
        engine.answers.put_nowait(an_answer(**changes))
        engine.answers.put_nowait(an_answer("chatcmpl-good"))
        await logged(service, 1)
        gauges = await service.gauges()
        assert dict(gauges.without) == {reason: 1}
        check_receipt((await service.of_response("chatcmpl-good"))[0])


async def test_a_checkpoint_without_a_digest_gets_no_receipts(store: SqliteOutbox) -> None:
    facts = replace(TOY_FACTS, weights_digest=None)
    engine = FakeEngine(replace(TOY_ENGINE_INFO, facts=facts))
    with pytest.raises(ValueError, match="this checkpoint has none"):
        ReceiptService(engine, store.receipts, SigningKey.new())


# -- looking for a receipt ---------------------------------------------------------------------


async def test_an_unknown_id_is_waited_for_and_then_unknown(
    store: SqliteOutbox, engine: FakeEngine
) -> None:
    async with running(store, engine) as service:
        service.wait_s = 0.05
        with refused(Refusal.UNKNOWN_RECEIPT):
            await service.of_response("chatcmpl-none")
        service.wait_s = 60.0
        asked = asyncio.create_task(service.of_response("chatcmpl-late"))
        await asked_for(service)
        engine.answers.put_nowait(an_answer("chatcmpl-late"))
        # It answers as soon as the receipt is stored: the log may or may not have it by then.
        async with asyncio.timeout(30):
            try:
                assert len(await asked) == 1
            except Refused:
                await logged(service, 1)
        assert not service._arrivals


async def test_too_many_waits_are_refused(
    store: SqliteOutbox, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proofserve.rounds.receipts.MOST_WAITS", 1)
    async with running(store, engine) as service:
        service.wait_s = 60.0
        asked = asyncio.create_task(service.of_response("chatcmpl-a"))
        await asked_for(service)
        with refused(Refusal.WAITS_FULL):
            await service.of_response("chatcmpl-b")
        engine.answers.put_nowait(an_answer("chatcmpl-a"))
        await asyncio.wait([asked])
        assert isinstance(asked.exception(), Refused | None)


async def test_a_receipt_is_deleted_after_its_time_and_its_id_stays(
    store: SqliteOutbox, engine: FakeEngine
) -> None:
    async with running(store, engine) as service:
        engine.answers.put_nowait(an_answer())
        await logged(service, 1)
        assert await store.receipts.prune(3600.0, 3600.0) == 0
        assert await store.receipts.prune(0.0, 3600.0) == 1
        with refused(Refusal.RECEIPT_DELETED):
            await service.of_response("chatcmpl-1")
        engine.answers.put_nowait(an_answer(prompt_ids=(4,)))
        engine.answers.put_nowait(an_answer("chatcmpl-2"))
        await logged(service, 2)
        gauges = await service.gauges()
        assert (gauges.kept, dict(gauges.without)) == (1, {"repeated_id": 1})
        entries = await check_log(service)
        assert await store.receipts.prune(0.0, 0.0) == 3
        service.wait_s = 0.0
        with refused(Refusal.UNKNOWN_RECEIPT):
            await service.of_response("chatcmpl-1")
        assert await check_log(service) == entries


# -- the log -----------------------------------------------------------------------------------


async def test_entries_are_read_in_pages(store: SqliteOutbox, engine: FakeEngine) -> None:
    async with running(store, engine) as service:
        for n in range(3):
            engine.answers.put_nowait(an_answer(f"chatcmpl-{n}"))
            await logged(service, n + 1)
        whole = await service.entries(-1, 10)
        assert len(whole) == 3
        assert await service.entries(-1, 2) == whole[:2]
        assert await service.entries(1, 10) == whole[2:]
        assert await service.entries(2, 10) == []
        assert await service.entries(-1, 0) == []


async def test_an_entry_that_is_changed_in_the_file_breaks_the_chain(
    store: SqliteOutbox, engine: FakeEngine, path: Path
) -> None:
    async with running(store, engine) as service:
        for n in range(3):
            engine.answers.put_nowait(an_answer(f"chatcmpl-{n}"))
            await logged(service, n + 1)
        with closing(sqlite3.connect(path)) as file, file:
            file.execute("UPDATE log_entries SET time_ms = time_ms - 60000 WHERE number = 0")
        with pytest.raises(ProtocolError, match="entry 1 does not follow 0"):
            require_chain([each.entry for each in await service.entries(-1, 10)])
        with pytest.raises(ProtocolError, match="entry_signature"):
            check_receipt((await service.of_response("chatcmpl-0"))[0])


async def test_a_restart_goes_on_with_the_chain_under_the_same_key(
    path: Path, engine: FakeEngine
) -> None:
    keys = set()
    for n in range(3):
        async with await SqliteOutbox.open(path) as store, running(store, engine) as service:
            engine.answers.put_nowait(an_answer(f"chatcmpl-{n}"))
            await logged(service, n + 1)
            assert await check_log(service) == n + 1
            keys.add(service.public_key)
            for earlier in range(n + 1):
                check_receipt((await service.of_response(f"chatcmpl-{earlier}"))[0])
    assert len(keys) == 1


def store_20_and_kill(path: Path) -> None:
    """A real process stores receipts without an entry, and is killed after 20 or more."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-m", "receipts.writer", path], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None
        told = [process.stdout.readline().strip() for _ in range(20)]
        process.send_signal(signal.SIGKILL)
    assert told[-1] == "19"


async def test_receipts_stored_before_a_kill_are_logged_at_the_next_start(
    path: Path, engine: FakeEngine
) -> None:
    await asyncio.to_thread(store_20_and_kill, path)
    async with await SqliteOutbox.open(path) as store:
        assert (await store.receipts.gauges()).unlogged >= 20
        with refused(Refusal.RECEIPT_NOT_LOGGED):
            await ReceiptService(engine, store.receipts, SigningKey.new()).of_response("chatcmpl-0")
        async with running(store, engine) as service:
            await logged(service, (await service.gauges()).stored)
            for n in range(20):
                check_receipt((await service.of_response(f"chatcmpl-{n}"))[0])
            assert await check_log(service) == 1


async def test_a_clock_that_is_set_back_leaves_the_log_in_order(
    store: SqliteOutbox, engine: FakeEngine
) -> None:
    times = [2_000_000_000.0]
    store.receipts._clock = lambda: times[0]
    async with running(store, engine, clock=lambda: times[0]) as service:
        for n, time in enumerate([2_000_000_000.0, 1_999_999_990.0, 2_000_000_001.0]):
            times[0] = time
            # The engine's clock is ahead: no answer ends after its receipt is made.
            engine.answers.put_nowait(an_answer(f"chatcmpl-{n}", created_ms=2_100_000_000_000))
            await logged(service, n + 1)
            (signed,) = await service.of_response(f"chatcmpl-{n}")
            assert signed.receipt.created_ms == time * 1000
            check_receipt(signed)
        assert await check_log(service) == 3


# -- faults ------------------------------------------------------------------------------------


async def test_nothing_is_lost_while_the_disk_is_full(
    store: SqliteOutbox, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proofserve.rounds.receipts._FIRST_PAUSE_S", 0.05)
    # The kernel fails every write beyond the limit, as a full disk does.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with running(store, engine) as service:
        service.most_waiting_bytes = 10_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            for n in range(5):
                engine.answers.put_nowait(an_answer(f"chatcmpl-{n}"))
            await waiting(service, 5)
            # Full of answers: it takes no more from the engine until these are stored.
            engine.answers.put_nowait(an_answer("chatcmpl-large", prompt_ids=(1,) * 2000))
            await waiting(service, 6)
            engine.answers.put_nowait(an_answer("chatcmpl-later"))
            await asyncio.sleep(0.2)
            gauges = await service.gauges()
            assert (gauges.stored, gauges.waiting) == (0, 6)
            assert not engine.answers.empty()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        await logged(service, 7)
        gauges = await service.gauges()
        assert (gauges.waiting, dict(gauges.without)) == (0, {})
        check_receipt((await service.of_response("chatcmpl-later"))[0])


async def test_the_end_of_the_server_stores_and_logs_what_was_taken(
    path: Path, engine: FakeEngine
) -> None:
    async with await SqliteOutbox.open(path) as store:
        service = ReceiptService(engine, store.receipts, SigningKey.new())
        service._take([an_answer(f"chatcmpl-{n}") for n in range(600)])
        await service.finish()
        gauges = await service.gauges()
        assert (gauges.stored, gauges.waiting, gauges.unlogged) == (600, 0, 0)
        check_receipt((await service.of_response("chatcmpl-599"))[0])


async def test_a_dead_engine_ends_nothing_but_the_taking(
    store: SqliteOutbox, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.gone = True
    async with running(store, engine) as service:
        await until(lambda: "no more receipts: the toy engine is dead" in caplog.text)
        service._take([an_answer()])
        await logged(service, 1)


# -- callbacks ---------------------------------------------------------------------------------


async def test_entries_are_posted_in_order_and_none_is_left_out(
    store: SqliteOutbox, engine: FakeEngine
) -> None:
    policy = CallbackPolicy(backoff_first_s=0.05, max_retries=0)
    with running_target() as target:
        target.answer = lambda _arrival: 200 if len(target.arrivals) > 2 else 503
        async with (
            running(store, engine, target.url) as service,
            sending(CallbackSender(store, policy)),
        ):
            for n in range(3):
                engine.answers.put_nowait(an_answer(f"chatcmpl-{n}"))
                await logged(service, n + 1)
            await until(lambda: len(posted(target)) == 3, seconds=30)
            entries = await service.entries(-1, 10)
    assert [signed_entry(each) for each in posted(target)] == entries
    assert {a.path for a in target.accepted} == {"/logged"}
    assert {a.body["public_key"] for a in target.accepted} == {service.public_key.hex()}


def posted(target: Any) -> list[dict[str, Any]]:
    return [entry for arrival in target.accepted for entry in arrival.body["entries"]]


async def test_a_target_that_is_down_has_one_callback_waiting(
    store: SqliteOutbox, engine: FakeEngine
) -> None:
    async with running(store, engine, "http://127.0.0.1:9") as service:
        for n in range(3):
            engine.answers.put_nowait(an_answer(f"chatcmpl-{n}"))
            await logged(service, n + 1)
        assert (await store.gauges()).pending == 1
