"""Runs one round until it ends: proves batches on the engine's cores, stores them in lane order.

Cores take batches of one lane as they become free, so a core that serves much chat proves little
and holds no other core up for long. What is stored is the same as with one core: no hole, and one
number as the progress of the round (ADR 30).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.nonces import NonceLane
from proofserve.rounds.computation import NOT_FINITE, ask, findings_of
from proofserve.rounds.errors import EngineFault, OutboxUnavailable, Refusal, Refused
from proofserve.rounds.ports import Outbox, ProofEngine, Prove
from proofserve.rounds.records import Deferred, Limits, ProofBatch, RoundProgress, RoundSpec
from proofserve.rounds.status import CoreStatus, Counters
from proofserve.rounds.tasks import end, reason_of, woken

_logger = logging.getLogger(__name__)
T = TypeVar("T")


def lane_of(spec: RoundSpec) -> NonceLane:
    """The nonces of a round. Raises Refused if it has no node number and node count."""
    if spec.lane is None:
        raise Refused(Refusal.LANE_UNSET, "Node ID and node count must be set")
    return spec.lane


# -- proving ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class SharedLane(Generic[T]):
    """The batches of a lane from index ``start`` on, ``size`` nonces each; ``T`` is a result.

    A batch is named by the lane index of its first nonce. At most ``most_ahead`` batches are
    begun from the oldest one without a result on. ``cores`` are those that take batches.
    """

    start: int
    size: int
    most_ahead: int
    cores: set[int]
    _oldest: int = field(init=False)
    _results: dict[int, T] = field(default_factory=dict, init=False)
    # Batches that a core gave back, and that core.
    _returned: dict[int, int] = field(default_factory=dict, init=False)
    changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set when a core may take another batch, or a result may be handed on."""

    def __post_init__(self) -> None:
        self._oldest = self.start

    def take(self, core: int) -> int | None:
        """The next batch for ``core``; None while there is none for it.

        The oldest batch that another core gave back comes first: all results wait for it. A batch
        that ``core`` itself gave back is left to the other cores, if there are any: ``core`` could
        hold it up again.
        """
        alone = self.cores <= {core}
        if batches := [batch for batch, by in self._returned.items() if alone or by != core]:
            batch = min(batches)
            del self._returned[batch]
            return batch
        if self.start >= self._oldest + self.most_ahead * self.size:
            return None
        self.start += self.size
        return self.start - self.size

    def give_back(self, batch: int, core: int) -> None:
        """``core`` has no result of ``batch``, which another core may prove now."""
        self._returned[batch] = core
        self.changed.set()

    def leave(self, core: int) -> None:
        self.cores.discard(core)
        self.changed.set()

    def finish(self, batch: int, result: T) -> None:
        self._results[batch] = result
        self.changed.set()

    def pop(self) -> T | None:
        """The result of the oldest batch, which then counts as handed on; None without one."""
        result = self._results.pop(self._oldest, None)
        if result is not None:
            self._oldest += self.size
            self.changed.set()
        return result


@dataclass(slots=True, eq=False)
class _Core:
    """One engine core: its session, and what became of its calls."""

    index: int
    prove: Prove
    proved: int = 0
    # The last fault of each of its calls that waits to try again.
    troubles: dict[int, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def status(self) -> CoreStatus:
        trouble = self.error or next(iter(self.troubles.values()), None)
        return CoreStatus(self.index, self.proved, self.error is not None, trouble)


class Prover:
    """Proves the batches of one round's lane on engine cores, with one session for each.

    ``first_index`` is the lane index of the first nonce. Every core has ``depth`` calls in flight.
    A core with ``max_faults`` faults in a row proves no more; the others take its batches.
    """

    def __init__(
        self,
        sessions: Sequence[Prove],
        spec: RoundSpec,
        first_index: int,
        counters: Counters,
        limits: Limits,
    ) -> None:
        self._spec = spec
        self._nonces = lane_of(spec)
        self._counters = counters
        self._limits = limits
        self._cores = [_Core(index, prove) for index, prove in enumerate(sessions)]
        ahead = limits.depth
        if len(sessions) > 1:
            many = limits.max_ahead_nonces // spec.batch_size
            ahead = max(len(sessions) * limits.depth, many)
        self._lane = SharedLane[ProofBatch | ProtocolError](
            first_index, spec.batch_size, ahead, set(range(len(sessions)))
        )
        self._failure: Exception | None = None
        self._calls = [
            asyncio.create_task(self._prove_for_ever(core, number))
            for core in self._cores
            for number in range(limits.depth)
        ]

    @property
    def cores(self) -> tuple[CoreStatus, ...]:
        return tuple(core.status for core in self._cores)

    @property
    def trouble(self) -> str | None:
        """The fault after which no core proves at the moment; None while one core does."""
        troubles = [status.trouble for status in self.cores]
        return next(iter(troubles)) if all(troubles) else None

    async def next(self) -> ProofBatch:
        """The next batch of the lane; later calls are already in flight.

        Raises EngineFault (every core had ``max_faults`` faults in a row), EngineGone and
        ProtocolError (the lane has no further nonces).
        """
        while (result := self._lane.pop()) is None:
            if self._failure is not None:
                raise self._failure
            await self._until_changed()
        if isinstance(result, ProtocolError):
            raise result
        return result

    async def aclose(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _until_changed(self) -> None:
        self._lane.changed.clear()
        await self._lane.changed.wait()

    async def _prove_for_ever(self, core: _Core, number: int) -> None:
        """One of the ``depth`` calls of ``core`` after the other."""
        faults = 0
        try:
            while core.error is None:
                if (batch := self._lane.take(core.index)) is None:
                    await self._until_changed()
                    continue
                try:
                    finished = await self._prove(core, batch)
                except EngineFault as fault:
                    faults += 1
                    self._lane.give_back(batch, core.index)
                    await self._back_off(core, number, faults, fault)
                    continue
                if finished is not None:
                    faults = 0
                    core.troubles.pop(number, None)
        except Exception as error:  # noqa: BLE001 - ``next`` raises it
            self._failure = error
            self._lane.changed.set()

    async def _prove(self, core: _Core, batch: int) -> ProofBatch | None:
        """Prove ``batch``, or give it back because chat has the core. Raises EngineFault."""
        try:
            nonces = self._nonces.batch(batch, self._spec.batch_size)
        except ProtocolError as error:
            self._lane.finish(batch, error)
            return None
        answer = await ask(core.prove, nonces, self._spec.work.scheme.width)
        if isinstance(answer, Deferred):
            self._counters.deferred(answer.seconds)
            self._lane.give_back(batch, core.index)
            return None
        core.proved += len(nonces)
        self._lane.finish(batch, answer)
        return answer

    async def _back_off(self, core: _Core, number: int, faults: int, fault: EngineFault) -> None:
        """Wait after a fault; the last allowed one stops ``core``. Raises it for the last core."""
        self._counters.fault()
        if core.error is not None:
            return
        if faults < self._limits.max_faults:
            core.troubles[number] = f"engine: {fault}"
            pauses = self._limits.fault_backoff_s
            await asyncio.sleep(pauses[min(faults, len(pauses)) - 1])
            return
        core.error = f"{faults} faults in a row, the last one: {fault}"
        self._lane.leave(core.index)
        left = sum(each.error is None for each in self._cores)
        if not left:
            raise EngineFault(core.error)
        known = {"round_id": self._spec.round_id}
        text = "round %s: engine core %d of %d proves no more, %d go on: %s"
        counts = (core.index, len(self._cores), left)
        _logger.error(text, self._spec.round_id, *counts, core.error, extra=known)


# -- storing ---------------------------------------------------------------------------------------


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
                await woken(self._closing, self._limits.record_retry_s)
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
