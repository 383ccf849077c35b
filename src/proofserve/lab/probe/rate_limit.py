"""Waiting as long as an endpoint asks for, and no longer than a probe can."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from proofserve.lab.client.errors import NodeError

# Seconds of one wait, and of all waits of a probe.
LONGEST_WAIT_S: Final = 120.0
ALL_WAITS_S: Final = 900.0
_FIRST_WAIT_S: Final = 1.0


class RateLimit:
    """One request that was told to wait makes all others wait too.

    ``told`` is called with the seconds of each wait. ``waited_s`` is how long requests were held.
    """

    def __init__(self, told: Callable[[float], None]) -> None:
        self._told = told
        self._until = 0.0
        self.waited_s = 0.0

    async def passed(self) -> None:
        """Return when no wait is left; another request may have made it longer meanwhile."""
        while (left := self._until - time.monotonic()) > 0.0:  # noqa: ASYNC110 - a clock, no event
            await asyncio.sleep(left)

    def hold(self, retry_after: str | None, attempt: int, url: str) -> None:
        """Wait as the header says; without one, twice as long at each ``attempt`` from 0 on.

        Raises NodeError if that is longer than a probe waits.
        """
        seconds = _seconds(retry_after)
        if seconds is None:
            seconds = _FIRST_WAIT_S * 2**attempt
        until = time.monotonic() + seconds
        more = max(0.0, until - max(self._until, time.monotonic()))
        if seconds > LONGEST_WAIT_S or self.waited_s + more > ALL_WAITS_S:
            raise NodeError(
                f"{url} asks to wait {seconds:.0f} s; a probe waits at most {LONGEST_WAIT_S:.0f} s"
                f" at a time and {ALL_WAITS_S:.0f} s in all. Try later, or with --concurrency 1"
            )
        self.waited_s += more
        self._until = max(self._until, until)
        if more:
            self._told(seconds)


def _seconds(retry_after: str | None) -> float | None:
    """The header's seconds, or those until its date; None if it says neither."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None
