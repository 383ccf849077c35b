"""The state of a node, its engine, queue, outbox and receipts, and the counters of its rounds."""

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from proofserve.rounds.errors import Refused
from proofserve.rounds.records import DistanceVerdict, RoundSpec, Verdict
from proofserve.rounds.state import State

# Upper ends of the bins of the forwards' histogram, in seconds; a last bin has no upper end.
FORWARD_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# Why an answer has no receipt.
NO_SKETCHES, REPEATED_ID, INVALID = "no_sketches", "repeated_id", "invalid"

Purpose = Literal["round", "job", "validation"]
V = TypeVar("V", bound=Verdict | DistanceVerdict)


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
    max_wait_s: float = 0.0
    forward_nonces: int = 0
    forward_s: float = 0.0
    part_s: float = 0.0
    age_s: float = 0.0

    @property
    def warning(self) -> str | None:
        """Why chat may wait for longer than it should; None if it does not."""
        if not 0 < self.max_wait_s < self.part_s:
            return None
        nonces = "1 nonce" if self.forward_nonces == 1 else f"{self.forward_nonces} nonces"
        return (
            f"a chat request may wait {self.part_s * 1e3:.0f} ms for the smallest part of a forward"
            f" of {nonces}, longer than {self.max_wait_s * 1e3:.0f} ms (--poc-max-wait-ms)"
        )


_SUMS = {"forwards", "busy_s", "deferred_s", "leased_blocks", "free_blocks", "unfinished_requests"}


def over_cores(cores: Sequence[EngineGauges]) -> EngineGauges:
    """The gauges of an engine with these cores; zeros without any."""
    if len(cores) == 1:
        return cores[0]
    slowest = max((core.part_s for core in cores), default=0.0)
    figures: dict[str, Any] = {
        "resume_ms": tuple(ms for core in cores for ms in core.resume_ms),
        "forward_counts": tuple(map(sum, zip(*(c.forward_counts for c in cores), strict=True))),
        "cores": tuple(cores),
        "forward_nonces": max((c.forward_nonces for c in cores if c.part_s == slowest), default=0),
    }
    for name in {each.name for each in fields(EngineGauges)} - figures.keys():
        of_cores = [getattr(core, name) for core in cores]
        figures[name] = sum(of_cores) if name in _SUMS else max(of_cores, default=0)
    return EngineGauges(**figures)


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
class RoundStats:
    """The counters of one round. Rates in nonces per second, durations in seconds.

    ``total_processed`` counts the nonces whose result the outbox has stored, and those recomputed
    to judge claims; ``total_found`` counts those that are published; ``failed`` those without a
    result. ``recent_nonces_per_second`` covers the last half a minute, ``nonces_per_second`` the
    whole round. Time in which the round does not run does not count.
    """

    total_processed: int
    total_found: int
    nonces_per_second: float
    recent_nonces_per_second: float
    failed: int
    elapsed_s: float
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
class ReceiptGauges:
    """Numbers over the life of the outbox file, but for ``waiting``, which is in memory.

    ``stored`` receipts were stored, ``kept`` of them are not deleted yet. ``without`` counts the
    answers without a receipt, by reason: ``no_sketches`` (the engine lost rows of the answer),
    ``repeated_id`` (an earlier answer with this id has a receipt), ``invalid`` (what the engine
    said about it contradicts itself). ``unlogged`` receipts are stored and not in the log yet;
    ``waiting`` answers are not stored yet.
    """

    stored: int
    kept: int
    log_entries: int
    unlogged: int
    without: Mapping[str, int]
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a node. ``spec`` and ``stats`` describe the configured round, running or not.

    ``paused_reason`` says why a running round makes no progress, ``error`` why a round ended.
    ``cores`` shows the engine's cores in a running round, ``lanes`` those of a fleet's round.
    """

    state: State
    spec: RoundSpec | None
    stats: RoundStats | None
    paused_reason: str | None
    error: str | None
    queue: QueueGauges
    cores: tuple[CoreStatus, ...] = ()
    lanes: LaneUse | None = None


# -- counters --------------------------------------------------------------------------------------


class NodeTotals:
    """Counts over all rounds and jobs, for metrics only: no decision depends on them.

    ``nonces`` counts by purpose and by whether the engine gave a row; ``validations`` counts by
    result; ``faults`` counts failed engine calls of rounds.
    """

    def __init__(self) -> None:
        # Zeros from the start, so that Prometheus sees the first increase.
        self.nonces: Counter[tuple[Purpose, str]] = Counter(
            {(work, outcome): 0 for work in get_args(Purpose) for outcome in ("proved", "failed")}
        )
        self.validations = Counter({"honest": 0, "fraud": 0, "error": 0})
        self.faults = 0

    def computed(self, work: Purpose, proved: int, failed: int) -> None:
        self.nonces[work, "proved"] += proved
        self.nonces[work, "failed"] += failed

    async def judged(self, running: Awaitable[V]) -> V:
        """Await the verdict of ``running`` and count it. A Refused error counts as nothing."""
        try:
            verdict = await running
        except Refused:
            raise
        except Exception:
            self.validations["error"] += 1
            raise
        self.validations["fraud" if verdict.fraud_detected else "honest"] += 1
        return verdict


class Counters:
    """Counts one round through all its phases. ``clock`` gives monotonic seconds.

    Its time runs from the construction, but not between ``end`` and ``begin``. All counts are also
    added to ``totals``, which remains after the round.
    """

    def __init__(
        self, clock: Callable[[], float], totals: NodeTotals, window_s: float = 30.0
    ) -> None:
        self._clock, self._totals, self._window_s = clock, totals, window_s
        self._started = clock()
        self._ended: float | None = None
        self._carried = self._processed = self._found = self._failed = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._deferred_calls = self._faults = 0
        self._deferred_s = 0.0

    def carry(self, processed: int, found: int, failed: int) -> None:
        """Add the counts of an earlier process for this round; the rates do not include them."""
        self._carried = processed
        self._processed, self._found, self._failed = processed, found, failed

    def done(self, processed: int, found: int, failed: int) -> None:
        self._totals.computed("round", processed, failed)
        self._count(processed, found, failed)

    def judged(self, recomputed: int, found: int) -> None:
        """Count nonces that were recomputed to judge claims; ``found`` of them win."""
        self._totals.computed("validation", recomputed, 0)
        self._count(recomputed, found, 0)

    def deferred(self, seconds: float) -> None:
        self._deferred_calls += 1
        self._deferred_s += seconds

    def fault(self) -> None:
        self._faults += 1
        self._totals.faults += 1

    def begin(self) -> None:
        if self._ended is not None:
            self._started += self._clock() - self._ended
            self._ended = None
            self._recent.clear()

    def end(self) -> None:
        """Stop the time, so that the rates of an ended round no longer change."""
        if self._ended is None:
            self._ended = self._clock()

    def read(self) -> RoundStats:
        now = self._clock() if self._ended is None else self._ended
        self._forget(now)
        elapsed = now - self._started
        # A round younger than the window has only its own time.
        window = min(elapsed, self._window_s)
        return RoundStats(
            total_processed=self._processed,
            total_found=self._found,
            nonces_per_second=_rate(self._processed - self._carried, elapsed),
            recent_nonces_per_second=_rate(sum(count for _, count in self._recent), window),
            failed=self._failed,
            elapsed_s=elapsed,
            deferred_calls=self._deferred_calls,
            deferred_s=self._deferred_s,
            faults=self._faults,
        )

    def _count(self, processed: int, found: int, failed: int) -> None:
        self._processed += processed
        self._found += found
        self._failed += failed
        self._recent.append((self._clock(), processed))
        self._forget(self._recent[-1][0])

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - self._window_s:
            self._recent.popleft()


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
