"""Stores the finished batches of a round in lane order, and counts them once they are stored."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from proofserve.rounds.counters import Counters
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.rounds.limits import RoundLimits
from proofserve.rounds.ports import Outbox
from proofserve.rounds.records import Finding


@dataclass(frozen=True, slots=True)
class Finished:
    """A computed batch; ``next_index`` is the lane index of the first nonce after it.

    ``processed`` nonces have a result; ``findings`` holds those that are published.
    """

    next_index: int
    processed: int
    findings: tuple[Finding, ...]
    failed: Mapping[int, str]


class RoundRecorder:
    """Stores the batches of one round while the engine computes the next ones.

    Batches that finish during a transaction share the next one: a slow disk delays no forward.
    """

    def __init__(
        self, outbox: Outbox, round_id: str, counters: Counters, limits: RoundLimits
    ) -> None:
        self._outbox = outbox
        self._round_id = round_id
        self._counters = counters
        self._limits = limits
        self._waiting: deque[Finished] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closing = asyncio.Event()
        # Why the last attempt to store failed; None if it succeeded.
        self.trouble: str | None = None

    @property
    def unstored_nonces(self) -> int:
        return sum(batch.processed + len(batch.failed) for batch in self._waiting)

    def add(self, batch: Finished) -> None:
        self._waiting.append(batch)
        self._wake.set()
        if len(self._waiting) >= self._limits.max_unrecorded:
            self._room.clear()

    async def wait_for_room(self) -> None:
        await self._room.wait()

    def close(self) -> None:
        self._closing.set()
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                if not await self._store(tuple(self._waiting)):
                    return
            if self._closing.is_set():
                return

    async def _store(self, batches: tuple[Finished, ...]) -> bool:
        findings = tuple(finding for batch in batches for finding in batch.findings)
        failed = {nonce: reason for batch in batches for nonce, reason in batch.failed.items()}
        while True:
            last_try = self._closing.is_set()
            try:
                await self._outbox.record(self._round_id, batches[-1].next_index, findings, failed)
            except OutboxUnavailable as error:
                self.trouble = f"outbox: {error}"
                if last_try:
                    return False
                await self._pause()
                continue
            self._settle(batches)
            return True

    def _settle(self, batches: tuple[Finished, ...]) -> None:
        self.trouble = None
        for batch in batches:
            self._waiting.popleft()
            self._counters.done(batch.processed, len(batch.findings), len(batch.failed))
        self._room.set()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), self._limits.record_retry_s)
