"""What a node, its engine, its queue and its outbox tell about themselves."""

from dataclasses import dataclass

from proofserve.rounds.records import RoundSpec
from proofserve.rounds.state import State

# The upper ends of the histogram of forwards, seconds; the last bin has none.
FORWARD_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """Counters read inside the engine. Durations in seconds, from the engine's start.

    ``forward_counts`` says how many forwards ended within each of ``FORWARD_BOUNDS_S`` and not
    the one before, and how many took longer; empty where nobody counts.
    """

    forwards: int
    busy_s: float
    deferred_s: float
    last_forward_s: float
    longest_chat_wait_s: float
    longest_chat_wait_batches: float
    resume_ms: tuple[float, ...]
    leased_blocks: int
    free_blocks: int
    unfinished_requests: int
    forward_counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OutboxGauges:
    """How full the outbox is: results kept, callbacks waiting, delivered and given up.

    ``revived`` counts those that were given up and then asked for again. ``failed_attempts`` since
    this process began; the others are of the whole file.
    """

    results: int
    pending: int
    delivered: int
    expired: int
    oldest_pending_s: float
    last_error: str | None
    revived: int = 0
    failed_attempts: int = 0


@dataclass(frozen=True, slots=True)
class QueueGauges:
    """Nonces of the jobs that wait or run, and how many may."""

    queued_nonces: int
    limit: int


@dataclass(frozen=True, slots=True)
class Stats:
    """The counters of one round. Rates in nonces per second, durations in seconds.

    ``processed`` counts the nonces whose outcome the outbox has stored, and those recomputed to
    judge claims; ``found`` those of them worth publishing; ``failed`` those without an outcome.
    ``recent_rate`` looks back ``window_s`` at most, ``rate`` to the start of the round. Pauses do
    not count as time.
    """

    processed: int
    found: int
    failed: int
    elapsed_s: float
    rate: float
    recent_rate: float
    window_s: float
    deferred_calls: int
    deferred_s: float
    faults: int


@dataclass(frozen=True, slots=True)
class Status:
    """What a node does. ``spec`` and ``stats`` are of the configured round, running or not.

    ``paused_reason`` says why a running round does not get on, ``error`` what ended a stopped one.
    """

    state: State
    spec: RoundSpec | None
    stats: Stats | None
    paused_reason: str | None
    error: str | None
    queue: QueueGauges
