"""What one round has done so far, and how fast."""

from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar, get_args

from proofserve.rounds.errors import Refused
from proofserve.rounds.records import DistanceVerdict, Verdict
from proofserve.rounds.status import Stats

Work = Literal["round", "job", "validation"]
V = TypeVar("V", bound=Verdict | DistanceVerdict)


class NodeTotals:
    """Counts for whoever watches the node; nothing of the node's own decisions rests on them.

    ``nonces`` by what they were computed for and whether that gave a row; ``validations`` by how
    they ended; ``faults`` of engine calls made for rounds.
    """

    def __init__(self) -> None:
        # Zeros from the start: who watches a rate must see the first step.
        self.nonces: Counter[tuple[Work, str]] = Counter(
            {(work, outcome): 0 for work in get_args(Work) for outcome in ("proved", "failed")}
        )
        self.validations = Counter({"honest": 0, "fraud": 0, "error": 0})
        self.faults = 0

    def computed(self, work: Work, proved: int, failed: int) -> None:
        """So many nonces have an outcome."""
        self.nonces[work, "proved"] += proved
        self.nonces[work, "failed"] += failed

    async def judged(self, running: Awaitable[V]) -> V:
        """The verdict that ``running`` comes to, counted. A refusal began nothing, and is none."""
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

    Time passes from its construction on, and not between ``end`` and ``begin``. What is counted
    here is counted in the node's ``tally``, too, which outlives the round.
    """

    def __init__(
        self, clock: Callable[[], float], tally: NodeTotals, window_s: float = 30.0
    ) -> None:
        self._clock = clock
        self._tally = tally
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
        """What the round had done before this process began; it counts, but not in the rates."""
        self._carried = processed
        self._processed, self._found, self._failed = processed, found, failed

    def done(self, processed: int, found: int, failed: int) -> None:
        """The outcome of so many nonces is known, and stored where it is to be kept."""
        self._tally.computed("round", processed, failed)
        self._count(processed, found, failed)

    def judged(self, recomputed: int, found: int) -> None:
        """So many nonces of somebody else were computed again, of which ``found`` win."""
        self._tally.computed("validation", recomputed, 0)
        self._count(recomputed, found, 0)

    def deferred(self, seconds: float) -> None:
        """An engine call gave way to chat for ``seconds`` and was not run."""
        self._deferred_calls += 1
        self._deferred_s += seconds

    def fault(self) -> None:
        """An engine call failed."""
        self._faults += 1
        self._tally.faults += 1

    def begin(self) -> None:
        """Let time pass, again if it was stopped."""
        if self._ended is not None:
            self._started += self._clock() - self._ended
            self._ended = None
            self._recent.clear()

    def end(self) -> None:
        """Stop the clock, so that the rates of an ended round stay what they were."""
        if self._ended is None:
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
