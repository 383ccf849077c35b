"""The outbox: results, progress and callbacks in one SQLite file."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from proofserve.outbox import deliveries, payload, pruning, results, schedule
from proofserve.outbox.database import Database
from proofserve.outbox.deliveries import Delivery
from proofserve.outbox.pruning import Pruned
from proofserve.outbox.schedule import CallbackPolicy, SendPlan, Situation
from proofserve.rounds.ports import Outbox
from proofserve.rounds.records import (
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

# Between two steps of pruning, seconds: nine tenths of the time belong to results and callbacks.
_PRUNE_PAUSE_S = 0.05


class SqliteOutbox(Outbox):
    """Keeps everything on disk; made by ``open``, and closes when its context is left.

    Methods raise ValueError for an unknown round, and OutboxUnavailable if the disk fails: nothing
    is stored then, and the outbox stays usable. ``news`` is set when the sender may have work.
    Only ``prune`` deletes anything.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self.news = asyncio.Event()
        self._failed_attempts = 0

    @classmethod
    async def open(cls, path: Path, clock: Callable[[], float] = time.time) -> Self:
        """Open or create the file. ``clock`` gives wall-clock seconds.

        Raises:
            NotAnOutbox: the file belongs to something else or to a newer version.
            OutboxInUse: another server works with it.
            OutboxUnavailable: it cannot be opened or created.
        """
        return cls(await Database.open(path), clock)

    async def close(self) -> None:
        """Finish the calls in progress and close the file; a second call does nothing."""
        await self._database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def open_round(self, spec: RoundSpec) -> RoundProgress:
        """Remember a round; the same one again is reopened with its results and progress.

        Raises ValueError for a round without a lane and when the id is known with another order,
        and OutboxUnavailable.
        """
        try:
            return await self._database.write(lambda c: results.open_round(c, spec, self._clock()))
        finally:
            # The round that this one ended has undelivered results that are due now.
            self.news.set()

    async def interrupted(self) -> RoundSpec | None:
        """The order of the round that is open, if one is."""
        return await self._database.read(results.open_spec)

    async def record(
        self, round_id: str, next_index: int, findings: Sequence[Finding], failed: Mapping[int, str]
    ) -> None:
        """Store findings, failures and progress in one transaction; see the port.

        Raises ValueError also for a distance that is not finite.
        """
        rows = results.rows_of(findings, failed)
        news = True
        try:
            news = await self._database.write(
                lambda c: results.add(c, round_id, next_index, rows, self._clock())
            )
        finally:
            # Also when cancelled: the rows may be stored all the same.
            if news:
                self.news.set()

    async def close_round(self, round_id: str) -> None:
        """Mark the round stopped; what is undelivered becomes due at once."""
        try:
            await self._database.write(lambda c: results.close_round(c, round_id, self._clock()))
        finally:
            self.news.set()

    async def push(self, url: str, about: CompletedJob | DistanceVerdict) -> None:
        """Queue the callback about a job or a verdict, due at once. Raises OutboxUnavailable."""
        endpoint, body = callback(about)
        await self.enqueue(endpoint, url, body)

    async def enqueue(self, endpoint: str, url: str, body: Mapping[str, Any]) -> None:
        """Queue one callback, due at once.

        Raises ValueError for an unknown endpoint and for a body that is not JSON, and
        OutboxUnavailable.
        """
        try:
            await self._database.write(
                lambda c: deliveries.add_job(c, endpoint, url, body, self._clock())
            )
        finally:
            self.news.set()

    async def results(self, after: int, limit: int) -> list[StoredResult]:
        """Rows with ``seq > after`` in order, at most ``limit``, those of expired callbacks too."""
        # SQLite takes a negative limit for none at all.
        return await self._database.read(lambda c: results.after(c, after, max(0, limit)))

    async def winners(self, round_id: str, limit: int) -> list[Winner]:
        """The newest winners of a round in the order of their storing, at most ``limit``."""
        return await self._database.read(
            lambda c: results.newest_winners(c, round_id, max(0, limit))
        )

    async def probe(self) -> None:
        """Write a page as it is. Raises OutboxUnavailable if a result could not be stored now."""
        await self._database.rewrite_version()

    async def prune(self, older_than_s: float) -> Pruned:
        """Delete what was delivered more than ``older_than_s`` seconds ago; how much that was.

        It takes its time: between two steps of some milliseconds all others have their turn.
        """
        before = self._clock() - older_than_s
        at_first = await self._database.read(pruning.totals)
        for step in (partial(pruning.step, before=before), pruning.shrink):
            while await self._database.write(step):  # noqa: ASYNC110 - a pause, not a condition
                await asyncio.sleep(_PRUNE_PAUSE_S)
        return (await self._database.read(pruning.totals)).since(at_first)

    async def gauges(self) -> OutboxGauges:
        """Count what is kept, waiting, delivered and expired."""
        read = await self._database.read(lambda c: deliveries.gauges(c, self._clock()))
        return replace(read, failed_attempts=self._failed_attempts)

    async def progress(self, round_id: str) -> RoundProgress:
        """How far the round got, in agreement with its stored rows. ValueError for an unknown."""
        return await self._database.read(lambda c: results.progress(c, round_id))

    async def plan(self, policy: CallbackPolicy, situation: Situation) -> SendPlan:
        """Cut what is due and tell the sender what to post now and how long to wait after it."""
        return await self._database.write(
            lambda c: schedule.plan(c, policy, situation, self._clock())
        )

    async def body(self, delivery: Delivery) -> bytes:
        """The JSON of a delivery, the same at each attempt."""
        return await payload.body(self._database, delivery)

    async def acknowledge(self, delivery: Delivery) -> None:
        """Mark a delivery as received by its target."""
        await self._database.write(lambda c: deliveries.acknowledge(c, delivery, self._clock()))

    async def fail(self, delivery: Delivery, error: str, pause_s: float | None) -> None:
        """Count a failed attempt; the next is due after ``pause_s``, None lets it expire."""
        await self._database.write(
            lambda c: deliveries.fail(c, delivery, error, pause_s, self._clock())
        )
        self._failed_attempts += 1
