"""How slow this machine is beside that on which tests' bounds were chosen, and bounded waits.

The processor's time of a small loop is not longer beside other processes, so it tells the machine
and not its load.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Final

_USUAL_S: Final = 0.027


def _measured() -> float:
    began = time.process_time()
    total = 0
    for number in range(400_000):
        total += number * number % 7
    return time.process_time() - began


PACE: Final = max(1.0, min(_measured() for _ in range(3)) / _USUAL_S)
"""What a bound is multiplied by; 1 on a machine that is as fast or faster."""


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Return once ``condition`` is true; fail after ``seconds`` at this machine's pace."""
    deadline = time.monotonic() + seconds * PACE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """As ``wait_until``; other tasks go on meanwhile, and ``condition`` may be one to await."""
    async with asyncio.timeout(seconds * PACE):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.005)
