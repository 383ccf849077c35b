"""Deadlines of everything in flight, looked at together: a timer a request would cost more."""

import asyncio
from typing import Protocol

# How late a timeout may come, seconds.
PERIOD_S = 0.05


class HasDeadline(Protocol):
    """Something with a deadline."""

    def check(self, now: float) -> None:
        """Give up if it is time to. ``now`` is the loop's clock, seconds."""


class Deadlines:
    """Calls ``check`` of everybody, twenty times a second."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched: set[HasDeadline] = set()
        self._timer: asyncio.TimerHandle | None = None
        # Set while nobody is watched, as of the last look.
        self.idle = asyncio.Event()

    def start(self) -> None:
        """Begin."""
        self._timer = self._loop.call_later(PERIOD_S, self._look)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def add(self, watched: HasDeadline) -> None:
        """Check it from now on."""
        self._watched.add(watched)

    def discard(self, watched: HasDeadline) -> None:
        """Check it no more."""
        self._watched.discard(watched)

    def all(self) -> list[HasDeadline]:
        """Everybody now, in no order."""
        return list(self._watched)

    def _look(self) -> None:
        # First of all: a check that raises must not be the last one.
        self.start()
        now = self._loop.time()
        for watched in self.all():
            watched.check(now)
        if self._watched:
            self.idle.clear()
        else:
            self.idle.set()
