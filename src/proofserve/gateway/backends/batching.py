"""All writes of one turn of the event loop, made together: to backends first, then to clients.

To wake a process that sleeps in a read costs the writer more than the write itself. Clients and
backends are quicker than the gateway: between two writes with a pause they fall asleep again.
Writes without a pause find the reading process awake (ADR 15 has the figures).
"""

import asyncio
import os
from collections.abc import Iterable

# What os.writev takes.
Data = bytes | bytearray | memoryview
# A larger part is written at once: one turn of the loop may read megabytes from a backend, and the
# gateway has to know before their end whether the client takes them.
LARGE = 64 * 1024
# Methods of the transport that stay as they are. They are bound to each wrapper: a method that
# passes a call on would cost more than the call.
UNCHANGED = (
    "abort",
    "get_extra_info",
    "get_write_buffer_size",
    "is_closing",
    "pause_reading",
    "resume_reading",
)


class WriteBatch:
    """The transports that have something to write in this turn of ``loop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._to_backends: list[BatchedTransport] = []
        self._to_clients: list[BatchedTransport] = []
        self._due = False

    def to_backend(self, transport: asyncio.Transport) -> asyncio.Transport:
        return self._batched(transport, self._to_backends)

    def to_client(self, transport: asyncio.Transport) -> asyncio.Transport:
        return self._batched(transport, self._to_clients)

    def _batched(
        self, transport: asyncio.Transport, queue: "list[BatchedTransport]"
    ) -> asyncio.Transport:
        raw = transport.get_extra_info("socket")
        if raw is None or transport.get_extra_info("sslcontext") is not None:
            # With TLS only the transport knows which bytes go through the socket.
            return transport
        return BatchedTransport(transport, raw.fileno(), queue, self)

    def put_off(self, transport: "BatchedTransport", queue: "list[BatchedTransport]") -> bool:
        """Flush ``transport`` at the end of the turn. False for the first one: it writes at once.

        The process that reads it sleeps in any case, and wakes up while the loop reads on.
        """
        if self._due:
            queue.append(transport)
            return True
        self._due = True
        self._loop.call_soon(self._write)
        return False

    def _write(self) -> None:
        self._due = False
        ready = [*self._to_backends, *self._to_clients]
        self._to_backends.clear()
        self._to_clients.clear()
        for transport in ready:
            transport.flush()


class BatchedTransport(asyncio.Transport):
    """A transport whose writes leave with those of the others, and go past its own queue.

    That is allowed while the transport's own queue is empty. What the socket does not take goes
    through the transport, and so do errors: back-pressure and a lost connection are told as usual.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        socket: int,
        queue: "list[BatchedTransport]",
        batch: WriteBatch,
    ) -> None:
        super().__init__()
        self._transport = transport
        self._socket = socket
        self._queue = queue
        self._batch = batch
        self._parts: list[Data] = []
        for name in UNCHANGED:
            setattr(self, name, getattr(transport, name))

    def write(self, data: Data) -> None:
        """Write as soon as the batch allows, large ``data`` now. It must not change until then."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Data]) -> None:
        """Write all of it as soon as the batch allows, without a copy."""
        parts = self._parts
        waits = parts or self._batch.put_off(self, self._queue)
        parts += list_of_data
        if not waits or (parts and len(parts[-1]) > LARGE):
            self.flush()

    def flush(self) -> None:
        parts, self._parts = self._parts, []
        # The socket's number of a closing transport may already belong to another connection.
        if not parts or self.is_closing():
            return
        written = 0
        if not self.get_write_buffer_size():
            try:
                written = os.writev(self._socket, parts)
            except OSError:
                # The socket is full, or broken: the transport notices that by itself.
                written = 0
        if written < sum(map(len, parts)):
            self._transport.writelines(_after(written, parts))

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()


def _after(written: int, parts: list[Data]) -> list[Data]:
    """What follows the first ``written`` bytes of ``parts``, without a copy."""
    for number, part in enumerate(parts):
        if written < len(part):
            return [memoryview(part)[written:], *parts[number + 1 :]]
        written -= len(part)
    return []
