"""The attempts of one request at backends: which one, over which connection, and which one next."""

from typing import Protocol

from proofserve.gateway.backends.fleet import Backend, Fleet
from proofserve.gateway.backends.upstream import Upstream
from proofserve.gateway.failures import Failure
from proofserve.gateway.metrics import GatewayTotals, Series

# Backends that one request may try.
MOST_BACKENDS = 3


class Sender(Protocol):
    """Has a request to send: is told that the backend ``host`` is connected, or why it is not."""

    def connected(self, upstream: Upstream, host: bytes) -> None: ...
    def retry_or_fail(self, failure: Failure) -> None: ...


class Attempts:
    """Holds a place at one backend at a time, and the connection to it.

    ``model`` and ``prefix`` (the beginning of the conversation, or nothing) decide the choice.
    """

    __slots__ = ("_fleet", "_sender", "_tried", "backend", "model", "prefix", "upstream")

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        # Only while it waits for a connection. A lasting reference would be a circle, which only
        # the garbage collector frees.
        self._sender: Sender | None = None
        self._tried: tuple[Backend, ...] = ()
        self.model: str | None = None
        self.prefix = b""
        self.backend: Backend | None = None
        self.upstream: Upstream | None = None

    def choose(self) -> bool:
        """Take a place at the best backend not tried yet, in exchange for the present one.

        Returns False, and changes nothing, if no other backend may be tried.
        """
        before, tried = self.backend, self._tried
        if before is not None:
            tried = (*tried, before)
            if len(tried) >= MOST_BACKENDS:
                return False
        backend = self._fleet.choose(self.model, self.prefix, tried)
        if backend is None:
            return False
        if before is not None:
            self.release()
            self._tried = tried
        self.backend = backend
        backend.chosen()
        return True

    def connect(self, sender: Sender, fresh: bool = False) -> None:
        """Get a connection to the chosen backend; a new one if it must be ``fresh``."""
        if self.backend is not None:
            self._sender = sender
            self.backend.pool.acquire(self, fresh)

    def connected(self, upstream: Upstream) -> None:
        """The pool has a connection: use it if the request has not ended meanwhile."""
        backend, sender, self._sender = self.backend, self._sender, None
        if backend is None or sender is None:
            upstream.return_unused()
            return
        self.upstream = upstream
        sender.connected(upstream, backend.pool.host)

    def connect_failed(self, failure: Failure) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.retry_or_fail(failure)

    def answered(self, status: int, totals: GatewayTotals) -> Series:
        """An answer has begun and goes to the client; returns where it is counted."""
        backend = self.backend
        if backend is None:
            raise RuntimeError("an answer came without a backend")
        if status < 500:
            backend.worked()
        return totals.series[backend.name, backend.label(self.model)]

    @property
    def until_close(self) -> bool:
        return self.upstream is not None and self.upstream.until_close

    def failed(self) -> None:
        if self.backend is not None:
            self.backend.failed()

    def lost(self) -> bool:
        """The connection has ended. True if the backend closed it before it saw the request.

        So it is with an idle connection that the backend was closing while we wrote to it: that is
        no fault of the backend's.
        """
        upstream, self.upstream = self.upstream, None
        return upstream is not None and upstream.used and upstream.silent

    def pause(self) -> None:
        if self.upstream is not None:
            self.upstream.pause()

    def resume(self) -> None:
        if self.upstream is not None:
            self.upstream.resume()

    def release(self) -> None:
        backend, upstream = self.backend, self.upstream
        self.backend = self.upstream = self._sender = None
        if upstream is not None:
            upstream.release()
        if backend is not None:
            backend.released()
