"""Which of several controllers reconciles: one lock in the database, or beside its file."""

import asyncio
import logging
from collections.abc import Callable

from proofserve.fleet.sql import address
from proofserve.fleet.sql.locks import LEADER, process_lock

_log = logging.getLogger(__name__)


class Leadership:
    """Tries for the lock while ``run`` runs. Made by ``Leadership(url)``, as ``FleetStore.open``.

    PostgreSQL: an advisory lock on a connection of its own. SQLite: a lock on ``<file>.leader``.
    ``changed`` is called in the event loop after each change of ``held``. Raises ValueError for a
    URL of another kind.
    """

    def __init__(
        self, url: str, interval_s: float = 1.0, changed: Callable[[], None] = lambda: None
    ) -> None:
        self._where = address.shown(address.parse(url))
        self._lock = process_lock(url, LEADER)
        self._interval_s = interval_s
        self._changed = changed
        self._held = False

    @property
    def held(self) -> bool:
        """Whether this process leads, as far as it knows: a lost lock is noticed within 4 s."""
        return self._held

    async def run(self) -> None:
        """Hold the lock, or try for it each ``interval_s``, until cancelled; then give it back."""
        try:
            while True:
                self._set(await self._lock.take())
                await asyncio.sleep(self._interval_s)
        finally:
            self._set(held=False)
            await self._lock.give_back()

    def _set(self, held: bool) -> None:
        if held is self._held:
            return
        self._held = held
        text = "this controller leads the fleet of %s" if held else "it no longer leads that of %s"
        _log.info(text, self._where)
        self._changed()
