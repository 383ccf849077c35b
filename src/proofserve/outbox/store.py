"""The outbox: results, progress and callbacks in one SQLite file."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from proofserve.outbox import callbacks, pruning, results
from proofserve.outbox.callbacks import CallbackPolicy, Delivery, SendPlan
from proofserve.outbox.database import SCHEMA_VERSION, Database, P, T, Work
from proofserve.outbox.pruning import Pruned
from proofserve.outbox.receipts import SqliteReceipts
from proofserve.protocol.commitments import Opening
from proofserve.rounds.ports import Outbox
from proofserve.rounds.records import (
    CommittedRound,
    CompletedJob,
    DistanceVerdict,
    Finding,
    RoundProgress,
    RoundSpec,
    StoredResult,
    Winner,
)
from proofserve.rounds.status import OutboxGauges
from proofserve.wire.callbacks import callback


class SqliteOutbox(Outbox):
    """Keeps everything on disk; made by ``open``, and closes when its context is left.

    It is also the sender's ``CallbackStore``.

    Methods raise ValueError for an unknown round, and OutboxUnavailable if the disk fails: nothing
    is stored then, and the outbox stays usable. ``news`` is set when the sender may have work.
    ``receipts`` are in the same file. Only ``prune`` deletes anything.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self.news = asyncio.Event()
        self.receipts = SqliteReceipts(database, clock, self.news)
        self._failed_attempts = 0

    @classmethod
    async def open(cls, path: Path, clock: Callable[[], float] = time.time) -> Self:
        """``clock`` gives wall-clock seconds. Raises as ``Database.open``."""
        return cls(await Database.open(path), clock)

    async def close(self) -> None:
        await self._database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def open_round(self, spec: RoundSpec) -> RoundProgress:
        """As the port. Raises ValueError for a round without a lane or with other parameters."""
        # Wakes the sender: an earlier round that this closes may have undelivered results.
        return await self._announce(results.open_round, spec, self._clock())

    async def interrupted(self) -> RoundSpec | None:
        return await self._database.read(results.open_spec)

    async def record(
        self, round_id: str, next_index: int, findings: Sequence[Finding], failed: Mapping[int, str]
    ) -> None:
        """As the port. Raises ValueError also for a distance that is not finite."""
        rows = results.rows_of(findings, failed)
        news = True
        try:
            news = await self._database.write(
                results.add, round_id, next_index, rows, self._clock()
            )
        finally:
            # Also after a cancellation: the rows may be stored nevertheless.
            if news:
                self.news.set()

    async def close_round(self, round_id: str) -> None:
        await self._announce(results.close_round, round_id, self._clock())

    async def push(self, url: str, about: CompletedJob | DistanceVerdict) -> None:
        endpoint, body = callback(about)
        await self.enqueue(endpoint, url, body)

    async def enqueue(self, endpoint: str, url: str, body: Mapping[str, Any]) -> None:
        """Queue one callback, due at once. Raises ValueError for a body that is not JSON."""
        await self._announce(callbacks.add_job, endpoint, url, body, self._clock())

    async def results(self, after: int, limit: int) -> list[StoredResult]:
        # SQLite treats a negative limit as no limit.
        return await self._database.read(results.after, after, max(0, limit))

    async def winners(self, round_id: str, limit: int) -> list[Winner]:
        return await self._database.read(results.newest_winners, round_id, max(0, limit))

    async def committed_round(
        self, block_hash: str, public_key: str, round_id: str | None
    ) -> CommittedRound:
        return await self._database.read(results.committed_round, block_hash, public_key, round_id)

    async def openings(self, committed: CommittedRound, nonces: Sequence[int]) -> list[Opening]:
        return await results.openings(self._database, committed, nonces)

    async def probe(self) -> None:
        await self._database.write(lambda c: c.execute(f"PRAGMA user_version = {SCHEMA_VERSION}"))

    async def prune(self, older_than_s: float) -> Pruned:
        """Delete what was delivered more than ``older_than_s`` seconds ago. Returns the numbers.

        It deletes in steps of some milliseconds, with pauses for other transactions.
        """
        before = self._clock() - older_than_s
        at_first = await self._database.read(pruning.totals)
        await self._database.delete(partial(pruning.step, before=before), pruning.shrink)
        return (await self._database.read(pruning.totals)).since(at_first)

    async def gauges(self) -> OutboxGauges:
        read = await self._database.read(callbacks.gauges, self._clock())
        return replace(read, failed_attempts=self._failed_attempts)

    async def plan(
        self, policy: CallbackPolicy, busy: frozenset[str] = frozenset(), flushing: bool = False
    ) -> SendPlan:
        return await self._database.write(callbacks.plan, policy, busy, flushing, self._clock())

    async def body(self, delivery: Delivery) -> bytes:
        return await callbacks.body(self._database, delivery)

    async def acknowledge(self, delivery: Delivery) -> None:
        await self._database.write(callbacks.acknowledge, delivery, self._clock())

    async def fail(self, delivery: Delivery, error: str, pause_s: float | None) -> None:
        await self._database.write(callbacks.fail, delivery, error, pause_s, self._clock())
        self._failed_attempts += 1

    async def _announce(self, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Write and wake the sender, also after an error: the rows may be stored nevertheless."""
        try:
            return await self._database.write(work, *args, **kwargs)
        finally:
            self.news.set()
