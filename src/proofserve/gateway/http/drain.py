"""An orderly end: refuse what is new, finish what was accepted, then let the server go."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from proofserve.gateway.relay.gateway import Gateway

# Balancers ask for health about once a second: long enough that one of them hears of it.
NOTICE_S = 1.0


@contextmanager
def draining_on_signals(gateway: Gateway) -> Iterator[None]:
    """Until the context ends a first SIGTERM or SIGINT drains, and a later one ends at once.

    The server's own handlers are called when the draining is over.
    """
    if threading.current_thread() is not threading.main_thread():
        # Signals are the main thread's, whoever runs there.
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
        self._noticed = False

    def signalled(self, number: int, server: Any) -> None:
        """Begin; ``server`` is the handler that the server has for the signal ``number``."""

        def end() -> None:
            for watched in self._gateway.deadlines.all():
                watched.shut_down()
            if callable(server):
                server(number, None)

        if self._task is None:
            self._task = self._gateway.loop.create_task(self._drain())
            self._task.add_done_callback(lambda _: end())
        elif self._task.done():
            end()
        elif self._noticed:
            self._task.cancel()
        # Else it is the first one again: where a whole group of processes is signalled, the parent
        # of several workers tells them once more.

    async def _drain(self) -> None:
        gateway = self._gateway
        gateway.draining = True
        await asyncio.sleep(NOTICE_S)
        self._noticed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(gateway.plan.drain):
                await gateway.deadlines.idle.wait()
