"""Runs and ends asyncio tasks, and says why a task failed."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from proofserve.protocol.errors import ProtocolError
from proofserve.rounds.errors import OutboxUnavailable, RoundsError

_logger = logging.getLogger(__name__)


async def end(*tasks: "asyncio.Task[Any]", grace_s: float) -> None:
    """Wait at most ``grace_s`` seconds for ``tasks``, then cancel them and wait for their end."""
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=grace_s)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late)


async def woken(wake: asyncio.Event, seconds: float) -> None:
    """Return when ``wake`` is set, at the latest after so many ``seconds``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()


async def delete_for_ever(
    delete: Callable[[], Awaitable[object]], keep_s: float, what: str, pause_s: float
) -> None:
    """Call ``delete`` each ``pause_s``, or four times in ``keep_s`` seconds; never if that is 0."""
    while keep_s:
        try:
            await delete()
        except OutboxUnavailable as error:
            _logger.warning("%s are deleted later: %s", what, error)
        await asyncio.sleep(min(pause_s, keep_s / 4))


def reason_of(task: "asyncio.Task[Any]") -> str | None:
    """Why a finished task failed, as a client may see it; None for success or cancellation.

    The text of an unexpected error goes only to the log, because it may contain secrets.
    """
    error = None if task.cancelled() else task.exception()
    if error is None:
        return None
    if isinstance(error, RoundsError | ProtocolError):
        return str(error)
    _logger.error("a task ended with an unexpected error", exc_info=error)
    return f"internal error ({type(error).__name__}), see the server's log"


@asynccontextmanager
async def beside(what: str, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run ``work`` as a task until the context ends; its failure is logged at once."""

    def report(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.critical("proofserve-%s has stopped; restart the server", what, exc_info=error)

    task = asyncio.create_task(work, name=f"proofserve-{what}")
    task.add_done_callback(report)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
