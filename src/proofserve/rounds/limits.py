"""The numbers that bound rounds and jobs. Durations in seconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from proofserve.rounds.errors import QueueFull
from proofserve.rounds.status import QueueGauges


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """How one round treats its engine and its outbox.

    ``depth`` engine calls are in flight at a time, and up to ``max_unrecorded`` finished batches
    may wait for the outbox before the engine is asked for more. ``fault_backoff_s`` are the pauses
    after the first, second, ... fault of the same batch; fault number ``max_faults`` ends the
    round. A stopped round has ``flush_timeout_s`` each for its engine and its outbox.
    """

    depth: int = 2
    max_unrecorded: int = 8
    record_retry_s: float = 1.0
    fault_backoff_s: tuple[float, ...] = (1.0, 2.0, 4.0)
    max_faults: int = 3
    flush_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class JobLimits:
    """How much may queue, how long chat may hold a chunk back, how long results are kept.

    And how many: of jobs and of their nonces, all results together.
    """

    max_queued_nonces: int = 100_000
    chunk_timeout_s: float = 60.0
    result_ttl_s: float = 300.0
    max_kept_jobs: int = 10_000
    max_kept_nonces: int = 1_000_000
    callback_retry_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """All of them. ``engine_answer_s`` bounds how long a question about the engine may take."""

    rounds: RoundLimits = field(default_factory=RoundLimits)
    jobs: JobLimits = field(default_factory=JobLimits)
    engine_answer_s: float = 5.0


class NonceLimit:
    """Counts nonces from their admission to their end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queued = 0

    @property
    def gauges(self) -> QueueGauges:
        """How full it is."""
        return QueueGauges(self._queued, self._limit)

    def admit(self, nonces: int) -> None:
        """Let so many in; they must be let out again. Raises QueueFull, with nothing changed."""
        if self._queued + nonces > self._limit:
            raise QueueFull(f"Queue full: {self._queued} nonces queued, limit is {self._limit}")
        self._queued += nonces

    def leave(self, nonces: int) -> None:
        """Let so many out."""
        self._queued -= nonces

    @contextmanager
    def admitted(self, nonces: int) -> Iterator[None]:
        """Let so many in for the length of a context. Raises QueueFull."""
        self.admit(nonces)
        try:
            yield
        finally:
            self.leave(nonces)
