"""Runs one round until it ends: proves batches, stores them, and logs the progress."""

import asyncio
import logging
from collections import deque
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

from proofserve.rounds.computation import NOT_FINITE, findings_of
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.rounds.ports import Outbox, ProofEngine
from proofserve.rounds.prover import Prover
from proofserve.rounds.records import Limits, ProofBatch, RoundProgress, RoundSpec
from proofserve.rounds.status import CoreStatus, Counters
from proofserve.rounds.tasks import end, reason_of

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RoundRecorder:
    """Stores the batches of one round while the engine computes the next ones.

    Batches that finish during a transaction share the next one: a slow disk delays no forward.
    They come in the order of the lane, from its index ``next_index`` on. ``has_room`` is set while
    more batches may be added. ``trouble`` says why the last attempt to store failed.
    """

    _outbox: Outbox
    _spec: RoundSpec
    _next_index: int
    _counters: Counters
    _limits: Limits
    trouble: str | None = None
    has_room: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: deque[ProofBatch] = field(default_factory=deque)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _closing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.has_room.set()

    @property
    def unstored_nonces(self) -> int:
        return sum(len(batch.nonces) + len(batch.failed) for batch in self._waiting)

    def add(self, batch: ProofBatch) -> None:
        self._waiting.append(batch)
        self._wake.set()
        if len(self._waiting) >= self._limits.max_unrecorded:
            self.has_room.clear()

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

    async def _store(self, batches: tuple[ProofBatch, ...]) -> bool:
        target = self._spec.target
        findings = [finding for batch in batches for finding in findings_of(batch, target)]
        failed = dict.fromkeys((n for batch in batches for n in batch.failed), NOT_FINITE)
        next_index = self._next_index + len(batches) * self._spec.batch_size
        while True:
            last_try = self._closing.is_set()
            try:
                await self._outbox.record(self._spec.round_id, next_index, findings, failed)
            except OutboxUnavailable as error:
                self.trouble = f"outbox: {error}"
                if last_try:
                    return False
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), self._limits.record_retry_s)
                continue
            self.trouble, self._next_index = None, next_index
            for _ in batches:
                self._waiting.popleft()
            processed = sum(len(batch.nonces) for batch in batches)
            self._counters.done(processed, len(findings), len(failed))
            self.has_room.set()
            return True


@dataclass(slots=True, eq=False)
class Generation:
    """Generates the proofs of one round, once. ``counters`` may already count earlier phases."""

    _engine: ProofEngine
    _outbox: Outbox
    _limits: Limits
    _counters: Counters
    _recorder: RoundRecorder | None = None
    _prover: Prover | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: bool = False
    _errors: list[str] = field(default_factory=list)

    @property
    def paused_reason(self) -> str | None:
        """Why the round makes no progress at the moment; None if it does."""
        tasks = (self._recorder, self._prover)
        return next((task.trouble for task in tasks if task is not None and task.trouble), None)

    @property
    def cores(self) -> tuple[CoreStatus, ...]:
        return self._prover.cores if self._prover is not None else ()

    @property
    def error(self) -> str | None:
        """The faults that ended the round, and what was lost by them; None if it was stopped."""
        return "; ".join(self._errors) or None

    def stop(self) -> None:
        """Make ``run`` end: it cancels calls in flight and stores finished batches."""
        self._stopping.set()

    async def run(self, spec: RoundSpec, opened: RoundProgress) -> None:
        """Generate until ``stop`` or a fault, which is kept in ``error`` and not raised.

        Finished batches are stored in either case. The round stays open in the outbox until
        ``close``, so that it can go on after a fault or a restart.
        """
        recorder = self._recorder = RoundRecorder(
            self._outbox, spec, opened.next_index, self._counters, self._limits
        )
        stopped = asyncio.create_task(self._stopping.wait())
        logging_progress = asyncio.create_task(self._log_progress(spec))
        proving = asyncio.create_task(self._prove(spec, opened.next_index, recorder))
        recording = asyncio.create_task(recorder.run())
        tasks = (proving, recording)
        try:
            await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            proving.cancel()
            await end(proving, grace_s=self._limits.flush_timeout_s)
            recorder.close()
            await end(recording, grace_s=self._limits.flush_timeout_s)
        finally:
            # After a cancellation from outside nothing may be awaited.
            for task in (stopped, logging_progress, *tasks):
                task.cancel()
        self._errors.extend(text for text in map(reason_of, tasks) if text)
        if lost := recorder.unstored_nonces:
            reason = recorder.trouble or "outbox: no answer"
            self._errors.append(f"{lost} finished nonces could not be stored ({reason})")

    async def close(self, spec: RoundSpec) -> None:
        """Close the round: its results are delivered at once. A failure goes to ``error``."""
        if self._closed:
            return
        closing = asyncio.create_task(self._outbox.close_round(spec.round_id))
        await end(closing, grace_s=self._limits.flush_timeout_s)
        if closing.cancelled():
            self._errors.append("outbox: no answer when the round was closed")
        elif text := reason_of(closing):
            self._errors.append(text)
        else:
            self._closed = True

    async def _prove(self, spec: RoundSpec, first_index: int, recorder: RoundRecorder) -> None:
        async with AsyncExitStack() as open_sessions:
            sessions = [
                await open_sessions.enter_async_context(self._engine.session(spec.work, core))
                for core in range(self._engine.cores)
            ]
            prover = Prover(sessions, spec, first_index, self._counters, self._limits)
            self._prover = prover
            try:
                while True:
                    recorder.add(await prover.next())
                    await recorder.has_room.wait()
            finally:
                await prover.aclose()

    async def _log_progress(self, spec: RoundSpec) -> None:
        """Log one line per interval: an operator sees the rate and what slows the round down."""
        kind = "valid" if spec.target is None else "found"
        deferred = self._counters.read().deferred_calls
        while True:
            await asyncio.sleep(self._limits.log_interval_s)
            stats = self._counters.read()
            chat = "chat" if stats.deferred_calls > deferred else "nothing"
            deferred = stats.deferred_calls
            pending: int | str = "unknown"
            with suppress(OutboxUnavailable, TimeoutError):
                async with asyncio.timeout(self._limits.log_interval_s):
                    pending = (await self._outbox.gauges()).pending
            _logger.info(
                "round %s: %d nonces, %.1f nonces/s, %d %s, held back by %s, %s callbacks pending",
                spec.round_id,
                stats.total_processed,
                stats.recent_nonces_per_second,
                stats.total_found,
                kind,
                self.paused_reason or chat,
                pending,
                extra={"round_id": spec.round_id},
            )
