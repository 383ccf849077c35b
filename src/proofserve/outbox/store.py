"""The outbox: results, progress and callbacks in one SQLite file."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from proofserve.outbox import pruning
from proofserve.outbox.callbacks import CallbackQueue
from proofserve.outbox.database import SCHEMA_VERSION, Database
from proofserve.outbox.pruning import Pruned
from proofserve.outbox.receipts import SqliteReceipts
from proofserve.outbox.results import ResultStore
from proofserve.rounds.ports import Outbox


class SqliteOutbox(ResultStore, CallbackQueue, Outbox):
    """Keeps everything on disk; made by ``open``, and closes when its context is left.

    It is also the sender's ``CallbackStore``.

    Methods raise ValueError for an unknown round, and OutboxUnavailable if the disk fails: nothing
    is stored then, and the outbox stays usable. ``news`` is set when the sender may have work.
    ``receipts`` are in the same file. Only ``prune`` deletes anything.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        super().__init__(database, clock, asyncio.Event())
        self.receipts = SqliteReceipts(database, clock, self.news)

    @classmethod
    async def open(cls, path: Path, clock: Callable[[], float] = time.time) -> Self:
        """``clock`` gives wall-clock seconds. Raises as ``Database.open``."""
        return cls(await Database.open(path), clock)

    async def close(self) -> None:
        await self.database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def probe(self) -> None:
        await self.database.write(lambda c: c.execute(f"PRAGMA user_version = {SCHEMA_VERSION}"))

    async def prune(self, older_than_s: float) -> Pruned:
        """Delete what was delivered more than ``older_than_s`` seconds ago. Returns the numbers.

        It deletes in steps of some milliseconds, with pauses for other transactions.
        """
        before = self.clock() - older_than_s
        at_first = await self.database.read(pruning.totals)
        await self.database.delete(partial(pruning.step, before=before), pruning.shrink)
        return (await self.database.read(pruning.totals)).since(at_first)
