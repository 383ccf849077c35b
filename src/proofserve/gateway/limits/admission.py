"""Who may use a backend now: permits in the order of arrival, and a queue with an end."""

import enum
from collections import OrderedDict
from typing import Protocol

# How much the latest permit changes what is thought usual.
NEWS = 0.1


class Waiter(Protocol):
    """Somebody who wants a permit."""

    def permit_granted(self) -> None:
        """The wait is over."""


class Entry(enum.Enum):
    """What came of asking for a permit."""

    GRANTED = enum.auto()
    QUEUED = enum.auto()
    REFUSED = enum.auto()


class PermitQueue:
    """``limit`` permits, and at most ``queue_limit`` waiters. Belongs to one event loop."""

    def __init__(self, limit: int, queue_limit: int) -> None:
        self.limit = limit
        self.queue_limit = queue_limit
        self.in_use = 0
        self._queue: OrderedDict[Waiter, None] = OrderedDict()
        self._granting = False
        self._usually_held = 0.0

    @property
    def expected_wait(self) -> float:
        """Seconds until somebody who came now would have a permit, as things have gone of late."""
        return (len(self._queue) + 1) * self._usually_held / self.limit

    @property
    def queued(self) -> int:
        """How many wait."""
        return len(self._queue)

    def enter(self, waiter: Waiter) -> Entry:
        """Ask for a permit. A granted one is told by the result, a later one by a call."""
        if self.in_use < self.limit and not self._queue:
            self.in_use += 1
            return Entry.GRANTED
        if len(self._queue) >= self.queue_limit:
            return Entry.REFUSED
        self._queue[waiter] = None
        return Entry.QUEUED

    def abandon(self, waiter: Waiter) -> None:
        """Leave the queue."""
        del self._queue[waiter]

    def leave(self, held: float) -> None:
        """Give back a permit that was ``held`` for seconds; whoever waited longest gets it."""
        self.in_use -= 1
        self._usually_held += NEWS * (held - self._usually_held)
        # A waiter that fails at once gives its permit back in the middle of this: the loop goes on
        # with the next, where a recursion would be as deep as the queue is long.
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
