"""One address in front of several controllers, as a load balancer of an operator has it."""

import asyncio
import itertools
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

_READ = 65_536


class Front:
    """Passes each connection on to the next of ``ports`` that accepts one, until the context ends.

    A connection ends with the controller that it was passed on to.
    """

    def __init__(self, port: int, ports: Sequence[int]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._ports = itertools.cycle(ports)
        self._tries = len(ports)
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="front")

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *_error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", self._port)

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task(self._loop)}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = await self._connect()
        if found is not None:
            theirs, to_them = found
            copies = (_copy(reader, to_them), _copy(theirs, writer))
            both = [asyncio.create_task(each) for each in copies]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in both:
                    each.cancel()
                to_them.close()
        writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        for _ in range(self._tries):
            with suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", next(self._ports))
        return None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_READ):
            writer.write(data)
            await writer.drain()
