"""The deadline of each stage, what its passing means, and the clock that looks at all of them."""

import asyncio
import math
from typing import Protocol

from proofserve.gateway import failures
from proofserve.gateway.failures import Failure
from proofserve.gateway.records import Timeouts
from proofserve.gateway.relay.stages import PIPELINED, QUEUED, RECEIVING, RELAYING, WAITING, Stage

# How late a timeout may come, seconds. One timer for each request would cost more.
PERIOD_S = 0.05


def deadline_of(stage: Stage, began: float, since: float, timeouts: Timeouts) -> float:
    """When an exchange has been in ``stage`` for too long, in seconds of the loop's clock.

    ``began`` is when its request, its wait for a permit or its time with the permit began, in that
    order; ``since`` is when the request left for the backend or the latest byte of the answer came.
    """
    if stage is QUEUED:
        return began + timeouts.queue
    if stage is PIPELINED:
        return math.inf
    most = began + timeouts.total
    if stage is WAITING:
        return min(since + timeouts.first_byte, most)
    # The pool limits the time to connect.
    return min(since + timeouts.stall, most) if stage is RELAYING else most


def failure_of(stage: Stage, began: float, now: float, timeouts: Timeouts) -> Failure:
    if stage is RECEIVING:
        return failures.RECEIVE_TIMEOUT
    if stage is QUEUED:
        return failures.QUEUE_TIMEOUT
    if now >= began + timeouts.total:
        return failures.TOTAL_TIMEOUT
    return failures.FIRST_BYTE_TIMEOUT if stage is WAITING else failures.STALL_TIMEOUT


class Watched(Protocol):
    """Gives up in ``check`` if its deadline has passed, in ``shut_down`` at once.

    ``now`` is the loop's clock in seconds.
    """

    def check(self, now: float) -> None: ...
    def shut_down(self) -> None: ...


class Deadlines:
    """Calls ``check`` of everything in ``watched``, twenty times a second."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None
        # Set while nothing is watched, as of the latest check.
        self.idle = asyncio.Event()

    def start(self) -> None:
        self._timer = self._loop.call_later(PERIOD_S, self._check_all)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_all(self) -> None:
        # First of all: a check that raises must not be the last one.
        self.start()
        now = self._loop.time()
        for watched in list(self.watched):
            watched.check(now)
        if self.watched:
            self.idle.clear()
        else:
            self.idle.set()
