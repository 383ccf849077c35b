"""Proves the batches of a round's lane on the engine's cores, and hands them on in lane order.

Cores take batches of one lane as they become free, so a core that serves much chat proves little
and holds no other core up for long. What is stored is the same as with one core: no hole, and one
number as the progress of the round (ADR 30).
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.nonces import NonceLane
from proofserve.rounds.computation import ask
from proofserve.rounds.errors import EngineFault, Refusal, Refused
from proofserve.rounds.ports import Prove
from proofserve.rounds.records import Deferred, Limits, ProofBatch, RoundSpec
from proofserve.rounds.status import CoreStatus, Counters

_logger = logging.getLogger(__name__)
T = TypeVar("T")


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
    """One engine core: its session, its calls, and what became of them."""

    index: int
    prove: Prove
    calls: "list[asyncio.Task[None]]" = field(default_factory=list)
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
        for core in self._cores:
            if not core.calls:
                core.calls = [
                    asyncio.create_task(self._prove_for_ever(core, number))
                    for number in range(self._limits.depth)
                ]
        while (result := self._lane.pop()) is None:
            if self._failure is not None:
                raise self._failure
            await self._until_changed()
        if isinstance(result, ProtocolError):
            raise result
        return result

    async def aclose(self) -> None:
        calls = [call for core in self._cores for call in core.calls]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

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


def lane_of(spec: RoundSpec) -> NonceLane:
    """The nonces of a round. Raises Refused if it has no node number and node count."""
    if spec.lane is None:
        raise Refused(Refusal.LANE_UNSET, "Node ID and node count must be set")
    return spec.lane
