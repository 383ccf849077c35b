"""The numbers that bound rounds and jobs, and the counter of waiting nonces. Seconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from proofserve.rounds.errors import QueueFull
from proofserve.rounds.status import QueueGauges


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """Limits of one round.

    ``depth`` calls of each engine core are in flight at a time. Several cores prove at most
    ``max_ahead_nonces`` from the oldest nonce without a result on, which a core may hold up while
    it serves chat. At most ``max_unrecorded`` finished batches wait
    for the outbox; then the round pauses its engine calls. ``fault_backoff_s`` holds the pauses
    after the first, second, ... fault of the same batch; fault number ``max_faults`` ends the
    round. A stopped round waits at most ``flush_timeout_s`` for its engine, and as long for its
    outbox. A running round logs one line every ``log_interval_s``.
    """

    depth: int = 2
    max_ahead_nonces: int = 65_536
    max_unrecorded: int = 8
    record_retry_s: float = 1.0
    fault_backoff_s: tuple[float, ...] = (1.0, 2.0, 4.0)
    max_faults: int = 3
    flush_timeout_s: float = 10.0
    log_interval_s: float = 5.0


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits of jobs: the queue, how long chat may delay a chunk, how long results are kept.

    ``max_kept_jobs`` and ``max_kept_nonces`` bound all kept results together.
    """

    max_queued_nonces: int = 100_000
    chunk_timeout_s: float = 60.0
    result_ttl_s: float = 300.0
    max_kept_jobs: int = 10_000
    max_kept_nonces: int = 1_000_000
    callback_retry_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    rounds: RoundLimits = field(default_factory=RoundLimits)
    jobs: JobLimits = field(default_factory=JobLimits)
    engine_answer_s: float = 5.0


class NonceLimit:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queued = 0

    @property
    def gauges(self) -> QueueGauges:
        return QueueGauges(self._queued, self._limit)

    def admit(self, nonces: int) -> None:
        """Add ``nonces``; ``leave`` must follow. Raises QueueFull and then adds nothing."""
        if self._queued + nonces > self._limit:
            raise QueueFull(f"Queue full: {self._queued} nonces queued, limit is {self._limit}")
        self._queued += nonces

    def leave(self, nonces: int) -> None:
        self._queued -= nonces

    @contextmanager
    def admitted(self, nonces: int) -> Iterator[None]:
        self.admit(nonces)
        try:
            yield
        finally:
            self.leave(nonces)
