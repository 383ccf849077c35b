"""Answers that end, a real outbox file, and a service that can be asked."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from proofserve.outbox.receipts import signing_key
from proofserve.outbox.store import SqliteOutbox
from proofserve.protocol.codec import to_float16
from proofserve.protocol.receipts.record import (
    FinishedAnswer,
    Sampling,
    SignedReceipt,
    is_signed,
    require_chain,
    require_inclusion,
    require_signatures,
)
from proofserve.rounds.receipts import ReceiptService
from support.fake_engine import FakeEngine
from support.pace import until

K_DIM = 16


def now_ms() -> int:
    return int(time.time() * 1000)


def an_answer(response_id: str = "chatcmpl-1", choice: int = 0, **changes: Any) -> FinishedAnswer:
    output = changes.pop("output_ids", (6, 7, 8))
    seed = sum(map(ord, response_id)) + choice
    vectors = np.random.default_rng(seed).normal(size=(len(output), K_DIM)).astype(np.float32)
    fields: dict[str, Any] = {
        "response_id": response_id,
        "choice": choice,
        "adapter": None,
        "sampling": Sampling(temperature=0.7),
        "prompt_ids": (1, 2, 3),
        "output_ids": output,
        "sketch_key": "2027-01-15-00",
        "k_dim": K_DIM,
        "sketches": to_float16(vectors).tobytes(),
        "finish_reason": "stop",
        "created_ms": now_ms(),
    }
    return FinishedAnswer(**(fields | changes))


@asynccontextmanager
async def running(
    store: SqliteOutbox,
    engine: FakeEngine,
    url: str | None = None,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[ReceiptService]:
    """A service that is killed at the end: it does not finish what waits."""
    key = signing_key(store_path(store).with_suffix(".pem"))
    service = ReceiptService(engine, store.receipts, key, url, clock)
    service.entry_every_s = 0.02
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def store_path(store: SqliteOutbox) -> Path:
    return store.database._path


async def logged(service: ReceiptService, count: int) -> None:
    """Wait until ``count`` receipts are stored and all are in the log."""

    async def is_logged() -> bool:
        gauges = await service.gauges()
        return (gauges.stored, gauges.unlogged) == (count, 0)

    await until(is_logged)


async def waiting(service: ReceiptService, count: int) -> None:
    """Wait until ``count`` answers wait to be stored."""

    async def do_wait() -> bool:
        return (await service.gauges()).waiting == count

    await until(do_wait)


async def asked_for(service: ReceiptService) -> None:
    """Wait until a request waits for a receipt."""

    async def is_asked() -> bool:
        return bool(service._arrivals)

    await until(is_asked)


async def check_log(service: ReceiptService) -> int:
    """Check the whole log as a validator does; the number of entries."""
    entries = await service.entries(-1, 10_000)
    require_chain([each.entry for each in entries])
    assert all(is_signed(e.entry.hash, e.signature, service.public_key) for e in entries)
    assert [each.entry.index for each in entries] == list(range(len(entries)))
    return len(entries)


def check_receipt(signed: SignedReceipt) -> None:
    """Check signatures, the path to the root, and the time of the entry."""
    require_signatures(signed)
    assert signed.inclusion is not None
    require_inclusion(signed.receipt.digest, signed.inclusion)
    late_ms = signed.inclusion.entry.time_ms - signed.receipt.created_ms
    assert 0 <= late_ms < 60_000
