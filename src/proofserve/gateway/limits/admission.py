"""Permits to be at a backend, and a bounded queue that grants them in the order of arrival."""

import enum
from collections import OrderedDict
from typing import Protocol

# Weight of the latest permit in the average time that a permit is held.
LATEST_WEIGHT = 0.1


class Waiter(Protocol):
    def permit_granted(self) -> None: ...


class Entry(enum.Enum):
    GRANTED = enum.auto()
    QUEUED = enum.auto()
    REFUSED = enum.auto()


class PermitQueue:
    """``limit`` permits, and at most ``queue_limit`` waiters. For one event loop."""

    def __init__(self, limit: int, queue_limit: int) -> None:
        self.limit = limit
        self.queue_limit = queue_limit
        self.in_use = 0
        self._queue: OrderedDict[Waiter, None] = OrderedDict()
        self._granting = False
        self._average_held = 0.0

    @property
    def expected_wait(self) -> float:
        """Expected wait of a new request, in seconds, from recent permit times."""
        return (len(self._queue) + 1) * self._average_held / self.limit

    @property
    def queued(self) -> int:
        return len(self._queue)

    def enter(self, waiter: Waiter) -> Entry:
        """Ask for a permit. A queued ``waiter`` gets it later, by ``permit_granted``."""
        if self.in_use < self.limit and not self._queue:
            self.in_use += 1
            return Entry.GRANTED
        if len(self._queue) >= self.queue_limit:
            return Entry.REFUSED
        self._queue[waiter] = None
        return Entry.QUEUED

    def abandon(self, waiter: Waiter) -> None:
        """Take ``waiter`` out of the queue. Raises KeyError if it is not there."""
        del self._queue[waiter]

    def leave(self, held: float) -> None:
        """Give back a permit that was ``held`` for seconds; the oldest waiter gets it."""
        self.in_use -= 1
        self._average_held += LATEST_WEIGHT * (held - self._average_held)
        # A waiter that fails at once calls this method again. Then the loop below grants the next
        # permit: a recursion could be as deep as the queue is long.
        if self._granting:
            return
        self._granting = True
        try:
            while self._queue and self.in_use < self.limit:
                waiter, _ = self._queue.popitem(last=False)
                self.in_use += 1
                waiter.permit_granted()
        finally:
            self._granting = False
