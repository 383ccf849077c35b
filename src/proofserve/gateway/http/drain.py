"""Shutdown: refuse new requests, finish the accepted ones, then stop the server."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from proofserve.gateway.relay.gateway import Gateway

# Time for load balancers to notice the shutdown: they ask for health about once a second.
NOTICE_S = 1.0
# Until then a second signal repeats the first: a supervisor signals the whole process group, and
# then the parent of several workers signals them again, late on a busy machine.
REPEAT_S = 3.0


@contextmanager
def draining_on_signals(gateway: Gateway) -> Iterator[None]:
    """In this context the first SIGTERM or SIGINT begins to drain; a later one ends at once.

    After draining, the server's own signal handler is called.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may handle signals.
        yield
        return
    drain = _Drain(gateway)
    loop = gateway.loop
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, drain.signalled, number, signal.getsignal(number))
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


class _Drain:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0

    def signalled(self, number: int, server: Any) -> None:
        """Begin to drain. ``server`` is the server's own handler of the signal ``number``."""

        def end() -> None:
            for watched in list(self._gateway.deadlines.watched):
                watched.shut_down()
            if callable(server):
                server(number, None)

        loop = self._gateway.loop
        if self._task is None:
            self._began = loop.time()
            self._task = loop.create_task(self._drain())
            self._task.add_done_callback(lambda _: end())
        elif self._task.done():
            end()
        elif loop.time() - self._began > REPEAT_S:
            self._task.cancel()

    async def _drain(self) -> None:
        gateway = self._gateway
        gateway.draining = True
        await asyncio.sleep(NOTICE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(gateway.plan.drain):
                await gateway.deadlines.idle.wait()
