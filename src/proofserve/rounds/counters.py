"""What one round has done so far, and how fast."""

from collections import deque
from collections.abc import Callable

from proofserve.rounds.records import Stats


class Counters:
    """Counts one round from its construction on. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float], window_s: float = 30.0) -> None:
        self._clock = clock
        self._window_s = window_s
        self._started = clock()
        self._ended: float | None = None
        self._processed = 0
        self._failed = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._deferred_calls = 0
        self._deferred_s = 0.0
        self._faults = 0

    def stored(self, processed: int, failed: int) -> None:
        """The outbox has stored this many artifacts and failures."""
        self._processed += processed
        self._failed += failed
        self._recent.append((self._clock(), processed))
        self._forget(self._recent[-1][0])

    def deferred(self, seconds: float) -> None:
        """An engine call gave way to chat for ``seconds`` and was not run."""
        self._deferred_calls += 1
        self._deferred_s += seconds

    def fault(self) -> None:
        """An engine call failed."""
        self._faults += 1

    def end(self) -> None:
        """Stop the clock, so that the rates of an ended round stay what they were."""
        self._ended = self._clock()

    def read(self) -> Stats:
        """The counters now."""
        now = self._clock() if self._ended is None else self._ended
        self._forget(now)
        elapsed = now - self._started
        # A young round has not filled its window; an old one is not blamed for its start.
        window = min(elapsed, self._window_s)
        return Stats(
            processed=self._processed,
            failed=self._failed,
            elapsed_s=elapsed,
            rate=_rate(self._processed, elapsed),
            recent_rate=_rate(sum(count for _, count in self._recent), window),
            window_s=self._window_s,
            deferred_calls=self._deferred_calls,
            deferred_s=self._deferred_s,
            faults=self._faults,
        )

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - self._window_s:
            self._recent.popleft()


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
