"""A count per minute that several gateways spend together (ADR 39)."""

from collections.abc import Callable

SECONDS = 60.0


class SharedWindow:
    """At most ``limit`` units in each whole minute of the clock, as far as this gateway knows.

    ``clock`` gives seconds since the epoch, as those of the other gateways do. ``changed`` is
    called with ``name`` after each change that the others must learn.
    """

    __slots__ = ("_changed", "_clock", "_unsent", "_used", "end", "limit", "name")

    def __init__(
        self, name: str, limit: int, clock: Callable[[], float], changed: Callable[[str], None]
    ) -> None:
        self.name = name
        self.limit = limit
        self.end = 0.0
        """When the latest window ends, in seconds of ``clock``."""
        self._clock = clock
        self._changed = changed
        self._used = 0
        self._unsent = 0

    def take(self, amount: int = 1) -> bool:
        self._begin()
        if self._used + amount > self.limit:
            return False
        self._count(amount)
        return True

    def charge(self, amount: int) -> None:
        self._begin()
        self._count(amount)

    def give_back(self, amount: int, end: float) -> None:
        """Return an unused ``amount`` that was taken in the window that ends at ``end``."""
        if end == self.end and self._clock() < end:
            self._count(-amount)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.end - self._clock())

    def unsent(self, end: float) -> int:
        """What was used here in the window that ends at ``end`` and the others do not know.

        From now on they do, or ``not_sent`` says that they do not.
        """
        if end != self.end:
            return 0
        amount, self._unsent = self._unsent, 0
        return amount

    def not_sent(self, amount: int, end: float) -> None:
        if end == self.end:
            self._unsent += amount

    def learn(self, total: int, end: float) -> None:
        """All gateways together have used ``total`` in the window that ends at ``end``."""
        if end > self.end:
            self._open(end)
        if end == self.end:
            self._used = total + self._unsent

    def _begin(self) -> None:
        now = self._clock()
        if now >= self.end:
            self._open(window_end(now))

    def _open(self, end: float) -> None:
        self.end = end
        self._used = self._unsent = 0

    def _count(self, amount: int) -> None:
        self._used += amount
        self._unsent += amount
        self._changed(self.name)


def window_end(now: float) -> float:
    """The end of the minute of ``now``, both in seconds since the epoch."""
    return (now // SECONDS + 1) * SECONDS
