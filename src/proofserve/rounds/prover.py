"""Asks the engine for the batches of a round in lane order, with several calls in flight."""

import asyncio
from collections import deque

from proofserve.protocol.nonces import NonceLane
from proofserve.rounds.calls import ask, failures_of, findings_of
from proofserve.rounds.counters import Counters
from proofserve.rounds.errors import EngineFault, LaneUnset
from proofserve.rounds.limits import RoundLimits
from proofserve.rounds.ports import ProofSession
from proofserve.rounds.recorder import Finished
from proofserve.rounds.records import Deferred, RoundSpec


class Prover:
    """Proves the batches of one round's lane through one engine session.

    ``first_index`` is the lane index of the first nonce.
    """

    def __init__(
        self,
        session: ProofSession,
        spec: RoundSpec,
        first_index: int,
        counters: Counters,
        limits: RoundLimits,
    ) -> None:
        self._session = session
        self._spec = spec
        self._lane = lane_of(spec)
        self._counters = counters
        self._limits = limits
        self._start = first_index
        self._in_flight: deque[asyncio.Task[Finished]] = deque()
        self._troubles: dict[int, str] = {}

    @property
    def trouble(self) -> str | None:
        """The fault after which a batch is being tried again; None if there is none."""
        return next(iter(self._troubles.values()), None)

    async def next(self) -> Finished:
        """The next batch of the lane; later calls are already in flight.

        Raises EngineFault (the batch failed ``max_faults`` times in a row), EngineGone and
        ProtocolError (the lane has no further nonces).
        """
        while len(self._in_flight) < self._limits.depth:
            self._in_flight.append(asyncio.create_task(self._prove(self._start)))
            self._start += self._spec.batch_size
        finished = await self._in_flight[0]
        self._in_flight.popleft()
        return finished

    async def aclose(self) -> None:
        for call in self._in_flight:
            call.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)

    async def _prove(self, start: int) -> Finished:
        nonces = self._lane.batch(start, self._spec.batch_size)
        faults = 0
        while True:
            try:
                answer = await ask(self._session, nonces, self._spec.work.scheme.width)
            except EngineFault as fault:
                faults += 1
                await self._back_off(start, faults, fault)
                continue
            if isinstance(answer, Deferred):
                self._counters.deferred(answer.seconds)
                continue
            self._troubles.pop(start, None)
            return Finished(
                next_index=start + self._spec.batch_size,
                processed=len(answer.nonces),
                findings=findings_of(answer, self._spec.target),
                failed=failures_of(answer),
            )

    async def _back_off(self, start: int, faults: int, fault: EngineFault) -> None:
        self._counters.fault()
        if faults >= self._limits.max_faults:
            raise EngineFault(f"{faults} faults in a row, the last one: {fault}") from fault
        self._troubles[start] = f"engine: {fault}"
        pauses = self._limits.fault_backoff_s
        await asyncio.sleep(pauses[min(faults, len(pauses)) - 1])


def lane_of(spec: RoundSpec) -> NonceLane:
    """The nonces of a round. Raises LaneUnset if it has no node number and node count."""
    if spec.lane is None:
        raise LaneUnset("Node ID and node count must be set")
    return spec.lane
