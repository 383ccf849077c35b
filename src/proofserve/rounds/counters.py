"""Counts and rates of one round, and totals of the node since its start."""

from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar, get_args

from proofserve.rounds.errors import Refused
from proofserve.rounds.records import DistanceVerdict, Verdict
from proofserve.rounds.status import Stats

Work = Literal["round", "job", "validation"]
V = TypeVar("V", bound=Verdict | DistanceVerdict)


class NodeTotals:
    """Counts over all rounds and jobs, for metrics only: no decision depends on them.

    ``nonces`` counts by purpose and by whether the engine gave a row; ``validations`` counts by
    result; ``faults`` counts failed engine calls of rounds.
    """

    def __init__(self) -> None:
        # Zeros from the start, so that Prometheus sees the first increase.
        self.nonces: Counter[tuple[Work, str]] = Counter(
            {(work, outcome): 0 for work in get_args(Work) for outcome in ("proved", "failed")}
        )
        self.validations = Counter({"honest": 0, "fraud": 0, "error": 0})
        self.faults = 0

    def computed(self, work: Work, proved: int, failed: int) -> None:
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
        self._clock = clock
        self._totals = totals
        self._window_s = window_s
        self._started = clock()
        self._ended: float | None = None
        self._carried = 0
        self._processed = 0
        self._found = 0
        self._failed = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._deferred_calls = 0
        self._deferred_s = 0.0
        self._faults = 0

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

    def read(self) -> Stats:
        now = self._clock() if self._ended is None else self._ended
        self._forget(now)
        elapsed = now - self._started
        # A round younger than the window has only its own time.
        window = min(elapsed, self._window_s)
        return Stats(
            processed=self._processed,
            found=self._found,
            failed=self._failed,
            elapsed_s=elapsed,
            rate=_rate(self._processed - self._carried, elapsed),
            recent_rate=_rate(sum(count for _, count in self._recent), window),
            window_s=self._window_s,
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
