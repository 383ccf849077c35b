"""Collects the writes of one turn of the event loop: first to backends, then to clients.

To wake a process that waits in a read costs the writer more than the write itself. If there is a
pause between two writes, the reading process handles the first one and waits again. If there is
none, it is still awake at the second one (ADR 15 has the figures).
"""

import asyncio
import os
from collections.abc import Iterable

# Types that os.writev accepts.
Data = bytes | bytearray | memoryview
# Bytes of a part above which it is written at once: one turn of the loop may read megabytes from a
# backend, and back-pressure of the client must act before all are read.
LARGE = 64 * 1024
# Methods that each wrapper takes from its transport: a wrapping method costs more than the call.
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
            # With TLS only the transport knows the bytes on the socket.
            return transport
        return BatchedTransport(transport, raw.fileno(), queue, self)

    def postpone(self, transport: "BatchedTransport", queue: "list[BatchedTransport]") -> bool:
        """Flush ``transport`` at the end of the turn. False for the first: it writes at once.

        The process that reads it must wake up in any case, and does so while this loop continues.
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
    """A transport whose writes go to the socket together with those of other transports.

    This is correct while the transport's own queue is empty. Bytes that the socket does not accept
    go through the transport, so back-pressure and lost connections are reported as usual.
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
        """Write with the batch; large ``data`` at once. It must not change until it is written."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Data]) -> None:
        """Write all parts with the batch, without a copy."""
        parts = self._parts
        waits = parts or self._batch.postpone(self, self._queue)
        parts += list_of_data
        if not waits or (parts and len(parts[-1]) > LARGE):
            self.flush()

    def flush(self) -> None:
        parts, self._parts = self._parts, []
        # The socket number of a closing transport may already belong to another connection.
        if not parts or self.is_closing():
            return
        written = 0
        if not self.get_write_buffer_size():
            try:
                written = os.writev(self._socket, parts)
            except OSError:
                # The socket is full or broken: the transport finds out itself.
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
    """The bytes of ``parts`` after the first ``written``, without a copy."""
    for number, part in enumerate(parts):
        if written < len(part):
            return [memoryview(part)[written:], *parts[number + 1 :]]
        written -= len(part)
    return []
