"""What one turn of the event loop writes, written together: to backends first, then to clients.

A reader that sleeps has to be woken, which costs its writer more than the write itself. Clients and
backends are quicker than a gateway: between two writes that lie apart they fall asleep again. One
write right after the other finds its reader awake (ADR 15 has the figures).
"""

import asyncio
import os
from collections.abc import Iterable

# What a vector of writes takes: anything that lies in memory as bytes.
Data = bytes | bytearray | memoryview
# From here on a part is written at once: one turn of the loop may read megabytes of a backend, and
# whether the client takes them has to be known before all of them are here.
LARGE = 64 * 1024
# What is none of our business. Bound to each connection: a method that passes a call on costs more
# than most of what it would call.
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
        """``transport``, to be written to before all clients."""
        return self._batched(transport, self._to_backends)

    def to_client(self, transport: asyncio.Transport) -> asyncio.Transport:
        """``transport``, to be written to after all backends."""
        return self._batched(transport, self._to_clients)

    def _batched(
        self, transport: asyncio.Transport, queue: "list[BatchedTransport]"
    ) -> asyncio.Transport:
        raw = transport.get_extra_info("socket")
        if raw is None or transport.get_extra_info("sslcontext") is not None:
            # What goes through such a socket is the transport's own secret.
            return transport
        return BatchedTransport(transport, raw.fileno(), queue, self)

    def put_off(self, transport: "BatchedTransport", queue: "list[BatchedTransport]") -> bool:
        """Flush ``transport`` at the end of the turn; False for the first one, which need not wait.

        Its reader sleeps in any case, and wakes up while the loop reads what else the turn brought.
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

    That is allowed while its own queue is empty. What the socket does not take goes through the
    transport, and so do its errors: back-pressure and the loss of the connection are told as ever.
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
        waits = bool(self._parts) or self._batch.put_off(self, self._queue)
        self._parts += list_of_data
        if not waits or (self._parts and len(self._parts[-1]) > LARGE):
            self.flush()

    def flush(self) -> None:
        """Write now what waits."""
        parts, self._parts = self._parts, []
        # One that is closing may have given its socket's number to another connection.
        if not parts or self.is_closing():
            return
        written = 0
        if not self.get_write_buffer_size():
            try:
                written = os.writev(self._socket, parts)
            except OSError:
                # A full socket, or a broken one, which the transport finds out by itself.
                written = 0
        if rest := _after(written, parts):
            self._transport.writelines(rest)

    def write_eof(self) -> None:
        """Tell the other side that nothing follows."""
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        """Close when everything is written."""
        self.flush()
        self._transport.close()


def _after(written: int, parts: list[Data]) -> list[Data]:
    """What follows the first ``written`` bytes of ``parts``, without a copy."""
    for number, part in enumerate(parts):
        if written < len(part):
            return [memoryview(part)[written:], *parts[number + 1 :]]
        written -= len(part)
    return []
