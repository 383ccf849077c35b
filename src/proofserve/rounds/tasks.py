"""Ending asyncio tasks that somebody owns, and telling why they ended."""

import asyncio
import logging
from typing import Any

from proofserve.protocol.errors import ProtocolError
from proofserve.rounds.errors import RoundsError

_logger = logging.getLogger(__name__)


async def end(*tasks: "asyncio.Task[Any]", grace_s: float) -> None:
    """Wait for ``tasks``, at most ``grace_s`` seconds; then cancel them and wait for that."""
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=grace_s)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late)


def reason_of(task: "asyncio.Task[Any]") -> str | None:
    """Why a finished task failed, as its reader may see it. Being cancelled is no failure.

    Errors of no known kind go to the log: their texts may say more than a reader should know.
    """
    error = None if task.cancelled() else task.exception()
    if error is None:
        return None
    if isinstance(error, RoundsError | ProtocolError):
        return str(error)
    _logger.error("a task ended with an unexpected error", exc_info=error)
    return f"internal error ({type(error).__name__}), see the server's log"
