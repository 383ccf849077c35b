"""Times measured inside the engine core: what proofs used, and how long chat waited for them."""

import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from proofserve.rounds.status import FORWARD_BOUNDS_S

# How many resume times (from chat's last step to the next forward) are kept.
RECENT = 512
# The most arrivals that are kept. The oldest are dropped first: their requests ended long ago.
ARRIVALS = 4096
# Proofs that could not use their share at once may make up for so many seconds at most. More would
# let proofs hold chat up for long afterwards; less than the longest step of chat would take from
# the share.
EARNED_S = 5.0


class ShareBudget:
    """The engine time, in seconds, that proofs may take from chat that never pauses.

    ``share`` (0 to 1) of the time in which a proof waits beside chat is added, and the time of
    forwards between two steps of chat is taken off. A forward may run while more than nothing is
    left, so proofs are ahead of their share by one forward at most. Time in which no proof waits
    adds nothing: otherwise a round that begins after hours of chat could have the engine nearly
    to itself for minutes.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._left_s = 0.0
        self._counted_until: float | None = None

    @property
    def is_open(self) -> bool:
        return self._left_s > 0

    def earn(self, start: float, end: float) -> None:
        """A proof waited beside chat from the last counted instant, or from ``start``, to ``end``.

        Both are in seconds of the monotonic clock.
        """
        since = start if self._counted_until is None else self._counted_until
        earned = self._share * (end - since)
        self._left_s = min(self._left_s + earned, self._share * EARNED_S)
        self._counted_until = end

    def spend(self, start: float, end: float) -> None:
        """A forward ran from ``start`` to ``end`` between two steps of chat."""
        self.earn(start, end)
        self._left_s -= end - start

    def pause(self) -> None:
        """No proof waits for chat: the time until the next ``earn`` or ``spend`` does not count."""
        self._counted_until = None


class CoreTimes:
    """Counters of one gate, totals since the engine's start.

    ``now``: the monotonic clock, in seconds. ``waited`` gets each wait of a request for a forward.
    """

    def __init__(
        self, now: Callable[[], float], waited: Callable[[str, float, float], None]
    ) -> None:
        self._now, self._waited = now, waited
        self._forwards = 0
        self._forward_counts = [0] * (len(FORWARD_BOUNDS_S) + 1)
        self._busy_s = 0.0
        self.last_forward_s = 0.0
        self._deferred_s = 0.0
        self._resume_ms: deque[float] = deque(maxlen=RECENT)
        self._last_step: float | None = None
        self._chat_ended = -math.inf
        self._arrivals: OrderedDict[str, float] = OrderedDict()
        self._waits: dict[str, tuple[float, float]] = {}
        self._longest_wait = (0.0, 0.0)

    def arrived(self, request_id: str, at: float) -> None:
        """A chat request reached the core. Called from the thread that reads its sockets."""
        self._arrivals[request_id] = at
        if len(self._arrivals) > ARRIVALS:
            self._arrivals.popitem(last=False)

    def stepped(self, start: float, end: float, deferring: bool) -> None:
        """A chat step ran from ``start`` to ``end``; ``deferring`` if a proof waited for it."""
        self._chat_ended = end
        if deferring:
            self._deferred_s += end - start
        self._last_step = end if deferring else None

    def since_chat(self) -> float:
        """Seconds since the last chat step; infinite if there was none."""
        return self._now() - self._chat_ended

    @contextmanager
    def forward(self, waiting: Callable[[], list[str]]) -> Iterator[None]:
        """Account for one forward; ``waiting`` names the chat requests it has kept waiting."""
        start = self._now()
        if self._last_step is not None:
            self._resume_ms.append((start - self._last_step) * 1e3)
            self._last_step = None
        try:
            yield
        finally:
            end = self._now()
            self._forwards += 1
            self._forward_counts[bisect_left(FORWARD_BOUNDS_S, end - start)] += 1
            self.last_forward_s = end - start
            self._busy_s += end - start
            self._charge(start, end, waiting())

    def read(self) -> dict[str, Any]:
        return {
            "forwards": self._forwards,
            "forward_counts": list(self._forward_counts),
            "busy_s": self._busy_s,
            "deferred_s": self._deferred_s,
            "last_forward_s": self.last_forward_s,
            "longest_chat_wait_s": self._longest_wait[0],
            "longest_chat_wait_batches": self._longest_wait[1],
            "resume_ms": list(self._resume_ms),
        }

    def _charge(self, start: float, end: float, waiting: list[str]) -> None:
        """Add this forward to the wait of each request that could not be served during it.

        A wait in batches is the wait divided by the duration of the forward that caused it. The
        waits of a request add up: a sum above 1 means that more than one forward delayed it.
        """
        waits = {}
        for request_id in waiting:
            seconds, batches = self._waits.get(request_id, (0.0, 0.0))
            began = max(start, self._arrivals.get(request_id, start))
            self._waited(request_id, began, end)
            wait = end - began
            waits[request_id] = (seconds + wait, batches + wait / (end - start))
            longest, own = self._longest_wait, waits[request_id]
            self._longest_wait = (max(longest[0], own[0]), max(longest[1], own[1]))
        self._waits = waits
