"""Waiting in line."""

import asyncio
from collections import deque


class WaitQueue:
    """First come, first served. A place is taken at once, not when some task gets to run."""

    def __init__(self) -> None:
        self._places: deque[asyncio.Event] = deque()

    def join(self) -> asyncio.Event:
        """A place at the end; it is set when it has become the first."""
        place = asyncio.Event()
        self._places.append(place)
        self._call_first()
        return place

    def leave(self, place: asyncio.Event) -> None:
        """Give a place up, from wherever it is in the line. Once given up, it stays so."""
        if place in self._places:
            self._places.remove(place)
            self._call_first()

    def _call_first(self) -> None:
        if self._places:
            self._places[0].set()
