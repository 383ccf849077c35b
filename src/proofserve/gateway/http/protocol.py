"""The hot path, one level below ASGI: uvicorn's own protocol with a short cut (ADR 11).

A POST to a path of ``relay/routes.py`` becomes an Exchange; every other request takes the ordinary
way to the FastAPI application. ASGI middleware does not see the short cut.
"""

import socket
import struct
from asyncio import TimerHandle, Transport
from collections.abc import Sequence
from typing import Any, cast

from proofserve.gateway.failures import Failure
from proofserve.gateway.http.checked_protocol import CheckedProtocol, CloseDelimited
from proofserve.gateway.relay.attempts import Header, Values
from proofserve.gateway.relay.exchange import Exchange
from proofserve.gateway.relay.gateway import Connection, PendingRequest

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Requests that may be sent ahead of an answer. Beyond that the gateway does not read from the
# client, and so does not notice when the client leaves.
AHEAD = 8
# For SO_LINGER: nothing lingers, and a close is a reset.
AT_ONCE = struct.pack("ii", 1, 0)


class GatewayProtocol(CheckedProtocol):
    """One connection of a client; the Connection that its exchanges write to."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._active: Exchange | None = None
        # Exchanges whose body has arrived; a pipelined one may have to wait for its turn.
        self._received: set[Exchange] = set()
        self._idle_since = 0.0
        self._idle_timer: TimerHandle | None = None

    # -- requests ------------------------------------------------------------------------------

    def head_received(
        self, method: bytes, version: str, headers: Sequence[Header], values: Values
    ) -> None:
        target = self._gateway.target_of(self.url) if method == b"POST" else None
        if target is None:
            super().head_received(method, version, headers, values)
            self._keep_encoded_slash()
            return
        before = self.cycle
        keep_alive = version == "1.1" and self.parser.should_keep_alive()
        client: Connection = self
        if version != "1.1":
            client = cast("Connection", CloseDelimited(self))
        exchange = Exchange(self._gateway, client, target, headers, values, keep_alive)
        self.cycle = exchange  # type: ignore[assignment] # it has what uvicorn reads of a cycle
        if before is None or before.response_complete:
            self._active = exchange
            self._invite(exchange)
        else:
            exchange.hold()
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]
            if len(self.pipeline) >= AHEAD:
                self.flow.pause_reading()

    def _keep_encoded_slash(self) -> None:
        raw_path = self.scope["raw_path"] or b""
        relayed = self._gateway.routes
        if self.scope["path"].encode() in relayed and raw_path not in relayed:
            # With an encoded slash it is another path, which nothing answers.
            self.scope["path"] = raw_path.decode()

    def _invite(self, exchange: Exchange) -> None:
        if not exchange.expects_continue:
            return
        if exchange.refusal is not None:
            # The client asks before it sends its body, and need not send it.
            exchange.keep_alive = False
            exchange.start()
        else:
            self.transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._arrived = self._read
        if isinstance(self.cycle, Exchange):
            self.cycle.body_received(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        exchange, self.incoming = self.incoming, None
        if exchange is None:
            # The head of a request with Upgrade.
            return
        active = self._active
        if active is not None and exchange is active:
            active.start()
        elif not isinstance(exchange, Exchange):
            super().on_message_complete()
        elif not exchange.response_complete:
            self._received.add(exchange)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        # uvicorn calls this for the next request of its pipeline.
        if not isinstance(cycle, Exchange):
            super()._start_asgi_task(cycle, app)
            return
        self._active = cycle
        cycle.resume_receiving()
        if cycle in self._received:
            self._received.discard(cycle)
            # Not at once: a pipeline of requests that all fail would be a recursion.
            self.loop.call_soon(self._start_pipelined, cycle)
        else:
            # It is the latest request of the connection, and its body has not arrived.
            self._invite(cycle)

    def refuse_incoming(self, failure: Failure) -> None:
        broken = self.incoming
        if not isinstance(broken, Exchange):
            super().refuse_incoming(failure)
            return
        broken.refuse(failure)
        broken.keep_alive = False
        if broken is self._active:
            broken.start()
        elif not broken.response_complete:
            self._received.add(broken)

    def _start_pipelined(self, exchange: Exchange) -> None:
        if not exchange.response_complete:
            exchange.start()

    # -- the transport's callbacks -------------------------------------------------------------

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override] # as uvicorn
        super().connection_made(self._gateway.writes.to_client(transport))
        # Bound once: a method that passes each part of each answer on would cost a call.
        self.write = self.transport.write
        self._gateway.connections.add(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._active is not None:
            self._active.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._active is not None:
            self._active.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gateway.connections.discard(self)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for cycle in (self._active, self.cycle, *(cycle for cycle, _ in self.pipeline)):
            if isinstance(cycle, Exchange):
                cycle.client_gone()
        if isinstance(self.cycle, Exchange):
            # uvicorn would wake an ASGI application, and an exchange has none.
            self.cycle = None  # type: ignore[assignment]
        super().connection_lost(exc)

    # -- the Connection of exchanges -----------------------------------------------------------

    @property
    def write_paused(self) -> bool:
        return self.flow.write_paused

    def answered(self, exchange: PendingRequest) -> None:
        if exchange is not self._active:
            return
        self._active = None
        if not exchange.keep_alive:
            self.transport.close()
        if self.pipeline or self.last_answer is not None or self.transport.is_closing():
            self.on_response_complete()
            return
        # The same without uvicorn's timer, which every answer sets and every request unsets.
        self.server_state.total_requests += 1
        if self.flow.read_paused:
            self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._look_if_idle)

    def _look_if_idle(self) -> None:
        self._idle_timer = None
        if not isinstance(self.cycle, Exchange) or not self.cycle.response_complete:
            # A request is in progress; or the latest request was uvicorn's, and so is the timer.
            return
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._idle_timer = self.loop.call_later(left, self._look_if_idle)
        else:
            self.transport.close()

    def abort(self) -> None:
        """Reset the connection: the client could take an orderly end for the answer's end."""
        raw = self.transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self.transport.abort()
