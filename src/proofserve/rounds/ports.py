"""The two seams of a round: the engine that computes and the outbox that keeps."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from proofserve.rounds.records import (
    Deferred,
    EngineInfo,
    Finding,
    Measurement,
    ProofBatch,
    RoundProgress,
    RoundSpec,
    StoredResult,
    Winner,
    Workload,
)
from proofserve.rounds.status import EngineGauges, OutboxGauges


class ProofSession(Protocol):
    """A lease on an engine for one workload."""

    async def prove(self, nonces: Sequence[int]) -> ProofBatch | Deferred:
        """Compute the proofs of ``nonces``; calls may overlap and are served in order.

        Raises:
            EngineFault: the computation failed; the engine lives.
            EngineGone: there is no engine any more.
        """
        ...


class ProofEngine(Protocol):
    """A deployed model that can prove its compute."""

    @property
    def engine_info(self) -> EngineInfo:
        """What is deployed. Constant for the life of the engine."""
        ...

    def session(self, work: Workload) -> AbstractAsyncContextManager[ProofSession]:
        """Open a lease; leaving the context returns it and cancels what is still deferred."""
        ...

    async def gauges(self) -> EngineGauges:
        """Read the counters. Raises EngineGone."""
        ...


class MeasurableEngine(Protocol):
    """An engine whose bare forward can be timed."""

    async def measure(self, work: Workload, nonces: Sequence[int], forwards: int) -> Measurement:
        """Time ``forwards`` forwards of ``nonces`` back to back; chat waits for all of them.

        Raises:
            EngineFault: a forward failed; the engine lives.
            EngineGone: there is no engine any more.
        """
        ...


class Outbox(Protocol):
    """Keeps results on disk until they are delivered, and afterwards for readers."""

    async def open_round(self, spec: RoundSpec) -> RoundProgress:
        """Remember a round, so that its results and callbacks survive a restart.

        The same one again goes on where it was; any other that is open is closed. Raises
        OutboxUnavailable.
        """
        ...

    async def interrupted(self) -> RoundSpec | None:
        """The round that is open: on a new start, the one that nobody had stopped."""
        ...

    async def record(
        self,
        round_id: str,
        next_index: int,
        findings: Sequence[Finding],
        failed: Mapping[int, str],
    ) -> None:
        """Store findings, failures (nonce to reason) and the lane's progress in one transaction.

        Raises:
            OutboxUnavailable: nothing was stored (a full disk, say); the same call may be tried
                again.
        """
        ...

    async def close_round(self, round_id: str) -> None:
        """Mark the round stopped and hand what is undelivered to the sender at once."""
        ...

    async def enqueue(self, endpoint: str, url: str, body: Mapping[str, Any]) -> None:
        """Queue one callback: POST ``body`` to ``{url}/{endpoint}``. Raises OutboxUnavailable."""
        ...

    async def results(self, after: int, limit: int) -> list[StoredResult]:
        """Rows with ``seq > after`` in order, at most ``limit``."""
        ...

    async def winners(self, round_id: str, limit: int) -> list[Winner]:
        """The newest winners of a round in the order of their storing, at most ``limit``."""
        ...

    async def probe(self) -> None:
        """Write something that changes nothing. Raises OutboxUnavailable if that fails."""
        ...

    async def gauges(self) -> OutboxGauges:
        """Count what is kept, waiting, delivered and expired."""
        ...
