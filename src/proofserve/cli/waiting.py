"""Waits of the demos: as long as something moves, however slow the machine."""

import time
from collections.abc import Callable
from typing import Final

from proofserve.cli.session import CommandSession
from proofserve.lab.client.errors import TooSlowError

# A busy processor without bf16 instructions may take a minute for one forward of many nonces.
STILL_S: Final = 180.0
# How often a log file gets a line about a step of a demo.
LOG_EVERY_S: Final = 2.0
_POLL_S: Final = 0.2


def wait_while_moving(
    session: CommandSession,
    what: str,
    condition: Callable[[], bool],
    reached: Callable[[], str],
    still_s: float = STILL_S,
) -> None:
    """Poll ``condition`` until it holds, and show what is ``reached`` so far.

    Raises TooSlowError, which names ``what``, once ``reached`` was the same for ``still_s``
    seconds; what both functions raise; and SystemExit after a signal.
    """
    before, moved_at = reached(), time.monotonic()
    session.line.reached(before)
    while not condition():
        session.interrupts.check()
        now = reached()
        if now != before:
            before, moved_at = now, time.monotonic()
            session.line.reached(now)
        if time.monotonic() - moved_at > still_s:
            raise TooSlowError(f"{what}: nothing has moved for {still_s:g} s ({before})")
        time.sleep(_POLL_S)
