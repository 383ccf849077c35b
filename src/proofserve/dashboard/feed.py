"""The newest snapshot for all open pages: it is read once per interval, however many they are."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from proofserve.dashboard.paging import PageView, encoded, page_of, ranked
from proofserve.dashboard.records import DashboardSnapshot

_logger = logging.getLogger(__name__)

# Seconds between two readings, and so between two events of a stream.
INTERVAL_S = 2.0
# Most open streams. A page that gets none asks for snapshots instead.
MOST_STREAMS = 32

Read = Callable[[], Awaitable[DashboardSnapshot]]


class SnapshotUnavailable(Exception):
    """The server cannot read its state at the moment. The text says why, and reaches the page."""


class SnapshotFeed:
    """Hands out what ``read`` returns, to all who show it.

    ``read`` may raise SnapshotUnavailable. Streams end once ``is_ending`` is true, so that they do
    not hold up the end of the server. ``clock`` gives monotonic seconds.
    """

    def __init__(
        self,
        read: Read,
        is_ending: Callable[[], bool] = lambda: False,
        interval_s: float = INTERVAL_S,
        most_streams: int = MOST_STREAMS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._is_ending = is_ending
        self._interval_s = interval_s
        self._most_streams = most_streams
        self._clock = clock
        self._latest: DashboardSnapshot | None = None
        self._read_at = 0.0
        self._reading: asyncio.Task[DashboardSnapshot] | None = None
        self.open_streams = 0

    @property
    def is_full(self) -> bool:
        return self.open_streams >= self._most_streams

    @contextmanager
    def one_stream(self) -> Iterator[None]:
        """Count a stream until the context ends."""
        self.open_streams += 1
        try:
            yield
        finally:
            self.open_streams -= 1

    async def latest(self) -> DashboardSnapshot:
        """The newest snapshot, its members sorted. Raises SnapshotUnavailable."""
        # Streams wake up a little before the interval is over.
        if self._latest is not None and self._clock() - self._read_at < 0.9 * self._interval_s:
            return self._latest
        if self._reading is None:
            self._reading = asyncio.create_task(self._renew())
            self._reading.add_done_callback(self._read_ended)
        # One reading serves all; a page that leaves must not end it for the others.
        return await asyncio.shield(self._reading)

    async def events(self, view: PageView) -> AsyncIterator[bytes]:
        """Server-sent events: ``snapshot``, ``same`` (nothing has changed) or ``problem``.

        While a reading takes long there are comments, so that the page knows the connection works.
        """
        shown = ""
        while not self._is_ending():
            began = self._clock()
            reading = asyncio.ensure_future(self.latest())
            try:
                while not (await asyncio.wait({reading}, timeout=self._interval_s))[0]:
                    yield b": reading\n\n"
                snapshot = page_of(reading.result(), view)
            except SnapshotUnavailable as error:
                shown = ""
                yield _event("problem", json.dumps({"detail": str(error)}).encode())
            else:
                body, tag = encoded(snapshot)
                if tag == shown:
                    yield _event("same", json.dumps({"at": snapshot.at}).encode())
                else:
                    yield _event("snapshot", body)
                shown = tag
            finally:
                reading.cancel()
            await asyncio.sleep(max(0.0, began + self._interval_s - self._clock()))

    async def _renew(self) -> DashboardSnapshot:
        snapshot = ranked(await self._read())
        self._latest, self._read_at = snapshot, self._clock()
        return snapshot

    def _read_ended(self, task: "asyncio.Task[DashboardSnapshot]") -> None:
        self._reading = None
        with suppress(asyncio.CancelledError):
            error = task.exception()
            if error is not None and not isinstance(error, SnapshotUnavailable):
                _logger.error("the dashboard cannot read the server's state", exc_info=error)


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
