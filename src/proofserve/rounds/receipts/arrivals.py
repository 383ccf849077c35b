"""Requests that wait for a receipt of a response."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from proofserve.rounds.errors import WaitsFull

# More requests than this do not wait.
MOST_WAITS = 256


class Arrival:
    def __init__(self) -> None:
        self.came = asyncio.Event()

    async def within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.came.wait()
        except TimeoutError:
            return False
        return True


class Arrivals:
    def __init__(self) -> None:
        self._expected: dict[str, list[Arrival]] = {}
        self._open = 0

    @contextmanager
    def of(self, response_id: str) -> Iterator[Arrival]:
        """Wait for a receipt of ``response_id``. Raises WaitsFull if too many requests do so."""
        if self._open >= MOST_WAITS:
            raise WaitsFull(f"{self._open} requests wait for receipts that are not known yet")
        arrival = Arrival()
        self._expected.setdefault(response_id, []).append(arrival)
        self._open += 1
        try:
            yield arrival
        finally:
            self._open -= 1
            left = self._expected[response_id]
            left.remove(arrival)
            if not left:
                del self._expected[response_id]

    def came(self, response_id: str) -> None:
        """A receipt of ``response_id`` is stored."""
        for arrival in self._expected.get(response_id, ()):
            arrival.came.set()
