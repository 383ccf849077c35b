"""The state of a node, its engine, its queue and its outbox, for clients and metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proofserve.rounds.records import RoundSpec
from proofserve.rounds.state import State

# Upper ends of the bins of the forwards' histogram, in seconds; a last bin has no upper end.
FORWARD_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """Counters read inside the engine. Durations in seconds, from the engine's start.

    ``forward_counts`` has one count of forwards for each bin of ``FORWARD_BOUNDS_S`` and a last one
    for longer forwards; it is empty if the engine does not count. ``cores`` has the gauges of each
    engine core where there are several; the others are then their sums, or their largest.
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
    cores: tuple["EngineGauges", ...] = ()


def over_cores(cores: Sequence[EngineGauges]) -> EngineGauges:
    """The gauges of an engine with these cores, at least one."""
    if len(cores) == 1:
        return cores[0]
    longest = max(cores, key=lambda core: core.longest_chat_wait_batches)
    return EngineGauges(
        forwards=sum(core.forwards for core in cores),
        busy_s=sum(core.busy_s for core in cores),
        deferred_s=sum(core.deferred_s for core in cores),
        last_forward_s=max(core.last_forward_s for core in cores),
        longest_chat_wait_s=longest.longest_chat_wait_s,
        longest_chat_wait_batches=longest.longest_chat_wait_batches,
        resume_ms=tuple(ms for core in cores for ms in core.resume_ms),
        leased_blocks=sum(core.leased_blocks for core in cores),
        free_blocks=sum(core.free_blocks for core in cores),
        unfinished_requests=sum(core.unfinished_requests for core in cores),
        forward_counts=tuple(map(sum, zip(*(core.forward_counts for core in cores), strict=True))),
        cores=tuple(cores),
    )


@dataclass(frozen=True, slots=True)
class CoreStatus:
    """What an engine core does in a round.

    ``proved`` counts nonces since the round was started in this process, stored or not. A core that
    is ``stopped`` proves no more until the round is started again; ``trouble`` is its last fault.
    """

    core: int
    proved: int
    stopped: bool
    trouble: str | None


@dataclass(frozen=True, slots=True)
class CoreLiveness:
    """Whether an engine core makes progress, as others see it, without an answer of the core.

    ``steps`` counts its steps of chat and its proof forwards. ``waited_s``: seconds since the last
    one while the core has had work, otherwise 0. A core is ``stalled`` if it hangs; ``reason``
    then says since when and how. One that is not ``watched``, because it runs on another machine,
    has zeros.
    """

    core: int
    watched: bool = True
    doing: str = "nothing"
    steps: int = 0
    waited_s: float = 0.0
    stalled: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class FleetMembership:
    """A node that joins a fleet by itself: the fleet's URL, and its own name and address there.

    ``since_sign_s``: seconds since the fleet last took a sign of life, None if it never did.
    ``error`` says why it did not take the newest one.
    """

    fleet: str
    name: str
    address: str
    since_sign_s: float | None
    error: str | None


@dataclass(frozen=True, slots=True)
class OutboxGauges:
    """What the outbox holds: results, and callbacks that wait, were delivered or expired.

    ``revived`` counts expired callbacks that an operator made due again. ``failed_attempts`` counts
    since this process began; the other numbers count the whole file.
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
    queued_nonces: int
    limit: int


@dataclass(frozen=True, slots=True)
class Stats:
    """The counters of one round. Rates in nonces per second, durations in seconds.

    ``processed`` counts the nonces whose result the outbox has stored, and those recomputed to
    judge claims; ``found`` counts those that are published; ``failed`` those without a result.
    ``recent_rate`` covers the last ``window_s``, ``rate`` the whole round. Time in which the round
    does not run does not count.
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
class LaneUse:
    """How a fleet has divided the nonces of its round.

    Number i of the round's nonces belongs to lane i modulo ``total``. ``processed`` has the nonces
    with a result by lane, for each lane that was given to a member.
    """

    total: int
    processed: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a node. ``spec`` and ``stats`` describe the configured round, running or not.

    ``paused_reason`` says why a running round makes no progress, ``error`` why a round ended.
    ``cores`` shows the engine's cores in a running round, ``lanes`` those of a fleet's round.
    """

    state: State
    spec: RoundSpec | None
    stats: Stats | None
    paused_reason: str | None
    error: str | None
    queue: QueueGauges
    cores: tuple[CoreStatus, ...] = ()
    lanes: LaneUse | None = None
