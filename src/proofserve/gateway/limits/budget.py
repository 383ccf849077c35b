"""So much per minute: requests of a key, or tokens."""

import time

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter

# The library counts, at several microseconds a call. What it has granted is spent from a purse, so
# that a generous limit costs a call now and then, and a tight one a call per request (ADR 12).
PURSE = 100


class Meter:
    """The library's counters, one set for a whole gateway."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.limiter = FixedWindowRateLimiter(self.storage)


class Budget:
    """At most ``per_minute`` in each window of a minute, which begins with its first use."""

    def __init__(self, meter: Meter, name: str, per_minute: int) -> None:
        self._meter = meter
        self._name = name
        self.per_minute = per_minute
        self._item = RateLimitItemPerMinute(per_minute)
        self._purse = 0
        self._window_end = 0.0

    def take(self, amount: int) -> bool:
        """Use ``amount`` if the window has that much left."""
        now = time.time()
        if now >= self._window_end:
            self._purse = 0
        if amount > self._purse and not self._fill(amount - self._purse):
            return False
        self._purse -= amount
        return True

    def give_back(self, amount: int, window_end: float) -> None:
        """Return what was taken in the window that ends at ``window_end`` and not used."""
        if window_end == self._window_end and time.time() < window_end:
            self._purse += amount

    def charge(self, amount: int) -> None:
        """Use ``amount`` whether or not the window has that much left."""
        if time.time() >= self._window_end:
            self._hit(1)
            self._purse = 1
        # Below zero it is a debt, which the next take has to cover, or what is given back.
        self._purse -= amount

    @property
    def window_end(self) -> float:
        """When the current window ends, seconds of the wall clock."""
        return self._window_end

    def seconds_left(self) -> float:
        """Until the current window ends."""
        return max(0.0, self._window_end - time.time())

    def _fill(self, missing: int) -> bool:
        for amount in (max(missing, self.per_minute // PURSE), missing):
            if self._meter.limiter.test(self._item, self._name, cost=amount):
                self._hit(amount)
                self._purse += amount
                return True
        return False

    def _hit(self, amount: int) -> None:
        self._meter.limiter.hit(self._item, self._name, cost=amount)
        self._window_end = self._meter.storage.get_expiry(self._item.key_for(self._name))
