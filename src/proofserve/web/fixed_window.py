"""A count per minute or hour, in fixed windows (ADR 17)."""

import time
from collections.abc import Callable

MINUTE_S, HOUR_S = 60.0, 3600.0


class FixedWindow:
    """At most ``limit`` units in each window of ``seconds``, which begins with its first use."""

    __slots__ = ("_clock", "_seconds", "_used", "end", "limit")

    def __init__(
        self, limit: int, clock: Callable[[], float] = time.monotonic, seconds: float = MINUTE_S
    ) -> None:
        self.limit = limit
        self.end = 0.0
        """When the latest window ends, in seconds of ``clock``."""
        self._clock = clock
        self._seconds = seconds
        self._used = 0

    def take(self, amount: int = 1) -> bool:
        now = self._clock()
        if now >= self.end:
            if amount > self.limit:
                return False
            self._begin(now)
        elif self._used + amount > self.limit:
            return False
        self._used += amount
        return True

    def charge(self, amount: int) -> None:
        now = self._clock()
        if now >= self.end:
            self._begin(now)
        self._used += amount

    def give_back(self, amount: int, end: float) -> None:
        """Return an unused ``amount`` that was taken in the window that ends at ``end``."""
        if end == self.end and self._clock() < end:
            self._used -= amount

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.end - self._clock())

    @property
    def left(self) -> int:
        return max(0, self.limit - self._used) if self._clock() < self.end else self.limit

    def _begin(self, now: float) -> None:
        self.end = now + self._seconds
        self._used = 0
