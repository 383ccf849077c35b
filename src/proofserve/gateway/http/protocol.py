"""The hot path, one level below ASGI: uvicorn's own protocol with a short cut (ADR 11).

A POST to one of ``RELAYED`` becomes an Exchange; everything else takes the ordinary way to the
FastAPI application. ASGI middleware does not see the short cut.
"""

import socket
import struct
from asyncio import AbstractEventLoop, TimerHandle, Transport
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from proofserve.gateway.relay.connection import Ended
from proofserve.gateway.relay.exchange import Exchange
from proofserve.gateway.relay.gateway import Gateway

RELAYED = frozenset(
    {b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings", b"/v1/responses"}
)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Requests that may be sent ahead of an answer. Beyond that nothing is read from the client, and so
# its leaving is not noticed either.
AHEAD = 8
# For SO_LINGER: nothing lingers, and a close is a reset.
AT_ONCE = struct.pack("ii", 1, 0)


class GatewayProtocol(HttpToolsProtocol):
    """One connection of a client; the Connection that its exchanges write to."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._gateway: Gateway = app_state["gateway"]
        self._active: Exchange | None = None
        # Those whose body has come; a pipelined one may have to wait for its turn.
        self._received: set[Exchange] = set()
        self._idle_since = 0.0
        self._idle_timer: TimerHandle | None = None

    # -- what the parser tells ---------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self.url = b""
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A line of its head."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the short cut, or leave the request to uvicorn."""
        if self.url.partition(b"?")[0] not in RELAYED or self.parser.get_method() != b"POST":
            self._leave_to_uvicorn()
            return
        before = self.cycle
        keep_alive = self.parser.should_keep_alive()
        exchange = Exchange(self._gateway, self, self.url, self.headers, keep_alive)
        self.cycle = exchange  # type: ignore[assignment] # it has what uvicorn reads of a cycle
        if before is None or before.response_complete:
            self._active = exchange
            self._invite(exchange)
        else:
            exchange.hold()
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]
            if len(self.pipeline) >= AHEAD:
                self.flow.pause_reading()

    def _leave_to_uvicorn(self) -> None:
        # Only an ASGI application needs the scope that uvicorn makes when a request begins.
        url, headers = self.url, self.headers
        super().on_message_begin()
        super().on_url(url)
        for name, value in headers:
            super().on_header(name, value)
        super().on_headers_complete()

    def _invite(self, exchange: Exchange) -> None:
        if not exchange.expects_continue:
            return
        if exchange.refusal is not None:
            # The client has asked before it sends, and may spare itself the body.
            exchange.keep_alive = False
            exchange.start()
        else:
            self.transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        if isinstance(self.cycle, Exchange):
            self.cycle.body_received(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has come completely."""
        exchange = self.cycle
        if not isinstance(exchange, Exchange):
            super().on_message_complete()
        elif exchange is self._active:
            exchange.start()
        elif not exchange.response_complete:
            self._received.add(exchange)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        # uvicorn asks for the next one of its pipeline.
        if not isinstance(cycle, Exchange):
            super()._start_asgi_task(cycle, app)
            return
        self._active = cycle
        cycle.turn()
        if cycle in self._received:
            self._received.discard(cycle)
            # Not at once: a pipeline of requests that all fail would be a recursion.
            self.loop.call_soon(self._start_pipelined, cycle)
        else:
            # It is the latest of the connection, whose body is still to come.
            self._invite(cycle)

    def _start_pipelined(self, exchange: Exchange) -> None:
        if not exchange.response_complete:
            exchange.start()

    # -- what the transport tells ------------------------------------------------------------

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override] # as uvicorn
        """A client has come."""
        super().connection_made(self._gateway.writes.to_client(transport))
        self._gateway.connections.add(self)

    def pause_writing(self) -> None:
        """The client takes less than it was given."""
        super().pause_writing()
        if self._active is not None:
            self._active.pause()

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        if self._active is not None:
            self._active.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left: everything that it asked for is dropped."""
        self._gateway.connections.discard(self)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for cycle in (self._active, self.cycle, *(cycle for cycle, _ in self.pipeline)):
            if isinstance(cycle, Exchange):
                cycle.client_gone()
        if isinstance(self.cycle, Exchange):
            # uvicorn would wake an ASGI application that is not there.
            self.cycle = None  # type: ignore[assignment]
        super().connection_lost(exc)

    # -- what an exchange asks for -----------------------------------------------------------

    @property
    def write_paused(self) -> bool:
        """Whether the client takes less than it was given."""
        return self.flow.write_paused

    def write(self, data: bytes) -> None:
        """Send to the client."""
        self.transport.write(data)

    def answered(self, exchange: Ended) -> None:
        """Wait for the next request, or take leave."""
        if exchange is not self._active:
            return
        self._active = None
        if not exchange.keep_alive:
            self.transport.close()
        if self.pipeline or self.transport.is_closing():
            self.on_response_complete()
            return
        # As there, but for a timer that would be set after each answer and unset by each request.
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._look_if_idle)

    def _look_if_idle(self) -> None:
        self._idle_timer = None
        if not isinstance(self.cycle, Exchange) or not self.cycle.response_complete:
            # Busy; or its latest request was uvicorn's, and so is the clock.
            return
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._idle_timer = self.loop.call_later(left, self._look_if_idle)
        else:
            self.transport.close()

    def abort(self) -> None:
        """Cut the connection, by a reset: an orderly end might be the end of the answer."""
        raw = self.transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self.transport.abort()
