"""Runs what only one controller may run, while it is the one."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from proofserve.fleet.sql.leadership import Leadership

# How soon the work ends after the lock was lost, and begins after it was won, at the latest.
_LOOK_EVERY_S = 0.2


async def while_leading(
    leadership: Leadership, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Run ``work`` while this process leads, again and again, until cancelled.

    Raises the error that ended ``work``.
    """
    running: asyncio.Task[None] | None = None
    try:
        while True:
            if running is not None and (running.done() or not leadership.held):
                await _end(running)
                running = None
            elif running is None and leadership.held:
                running = asyncio.create_task(work())
            await asyncio.sleep(_LOOK_EVERY_S)
    finally:
        if running is not None:
            await _end(running)


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
