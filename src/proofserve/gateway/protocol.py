"""A client's connection: uvicorn's protocol with stricter HTTP and a short cut below ASGI (ADR 11).

A POST to one of the gateway's routes becomes an Exchange; every other request takes the ordinary
way to the FastAPI application. ASGI middleware does not see the short cut.

A request that breaks a rule of HTTP gets one answer in OpenAI's shape, and then the connection
closes: where its body ends is not known, so nothing after it can be trusted to be a request.
"""

import logging
import socket
import struct
from asyncio import TimerHandle, Transport
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proofserve.gateway.answer import Header, Values
from proofserve.gateway.exchange import Exchange
from proofserve.gateway.failures import (
    HEADERS_TOO_LARGE,
    INVALID_HTTP,
    NOT_IMPLEMENTED,
    Failure,
    RefusedByGateway,
)
from proofserve.gateway.framing import (
    MAX_HEAD_BYTES,
    CloseDelimited,
    check_size,
    checked_headers,
    origin_form,
    without_upgrade,
)
from proofserve.gateway.gateway import Connection, Gateway, PendingRequest, RelayTarget
from proofserve.web import request_id_of

log = logging.getLogger(__name__)
# The most that one read of a socket brings, bytes: a body's end may come with the next head.
READ_BYTES = 256 * 1024
# For the client to read a refusal while its own data is still arriving, seconds. A connection that
# is closed with unread data is reset, and the refusal is lost.
LINGER_S = 1.0
# Fields behind the last chunk are not headers (RFC 9110, section 6.5.1): they are dropped.
TRAILERS: Any = deque(maxlen=0)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Requests that may be sent ahead of an answer. Beyond that the gateway does not read from the
# client, and so does not notice when the client leaves.
AHEAD = 8
# For SO_LINGER: nothing lingers, and a close is a reset.
AT_ONCE = struct.pack("ii", 1, 0)


class GatewayProtocol(HttpToolsProtocol):
    """One connection of a client; the Connection that its exchanges write to."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._gateway: Gateway = self.app_state["gateway"]
        # Bytes of the latest read, and all since the read that brought the beginning of the
        # current head or the latest part of a body: those of a head, or of trailers.
        self._read = self._arrived = 0
        # The cycle whose body is arriving.
        self._incoming: Any = None
        # Set once input is refused: what follows is not read as HTTP.
        self._input_refused = False
        # The answer to refused input, after the answers to the requests before it.
        self._last_answer: Failure | None = None
        self._active: Exchange | None = None
        # Exchanges whose body has arrived; a pipelined one may have to wait for its turn.
        self._received: set[Exchange] = set()
        self._idle_since = 0.0
        self._idle_timer: TimerHandle | None = None

    # -- input -----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._input_refused:
            return
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        self._read = len(data)
        self._arrived += self._read
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._ignore_upgrades(memoryview(data)[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse_input(_failure_of(error))
        else:
            if self._arrived > MAX_HEAD_BYTES + READ_BYTES:
                self._refuse_input(HEADERS_TOO_LARGE)

    def _ignore_upgrades(self, rest: memoryview) -> None:
        """Parse the head again without ``Upgrade``, which a server may ignore, and then ``rest``.

        The parser ends a request with ``Upgrade`` at its head, and so loses its body.
        """
        while True:
            old = self.parser
            head = without_upgrade(old.get_method(), self.url, old.get_http_version(), self.headers)
            self.parser = httptools.HttpRequestParser(self)
            # As uvicorn does: what follows a last request is not an error.
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(head)
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            else:
                return

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self._arrived = self._read

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Check the head, and begin an exchange, or a request to the application.

        Raises RefusedByGateway, which the parser passes on as a HttpParserError.
        """
        parser = self.parser
        if self._arrived > MAX_HEAD_BYTES:
            check_size(self.url, self.headers)
        version = parser.get_http_version()
        headers, values = checked_headers(version, self.headers)
        method = parser.get_method()
        if parser.should_upgrade():
            if method == b"CONNECT":
                raise RefusedByGateway(NOT_IMPLEMENTED)
            # Its head comes again, without Upgrade.
            return
        if b"%" in self.url or not self.url.startswith(b"/"):
            self.url, host = origin_form(self.url)
            if host is not None:
                headers = [(b"host", host), *(each for each in headers if each[0] != b"host")]
        self.headers = TRAILERS
        target = self._gateway.target_of(self.url) if method == b"POST" else None
        if target is None:
            self._begin_cycle(version, headers)
        else:
            self._begin_exchange(target, version, headers, values)
        self._incoming = self.cycle

    def _begin_cycle(self, version: str, headers: Sequence[Header]) -> None:
        # Only an ASGI application needs the scope that uvicorn makes when a request begins.
        target = self.url
        super().on_message_begin()
        super().on_url(target)
        for name, value in headers:
            super().on_header(name, value)
        super().on_headers_complete()
        self.headers = TRAILERS
        if version != "1.1":
            self.cycle.transport = cast("Transport", CloseDelimited(self.transport))
        raw_path = self.scope["raw_path"] or b""
        relayed = self._gateway.routes
        if self.scope["path"].encode() in relayed and raw_path not in relayed:
            # With an encoded slash it is another path, which nothing answers.
            self.scope["path"] = raw_path.decode()

    def _begin_exchange(
        self, target: RelayTarget, version: str, headers: Sequence[Header], values: Values
    ) -> None:
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
        exchange, self._incoming = self._incoming, None
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

    def _start_pipelined(self, exchange: Exchange) -> None:
        if not exchange.response_complete:
            exchange.start()

    # -- refused input ---------------------------------------------------------------------------

    def _refuse_input(self, failure: Failure) -> None:
        """Read no more requests. ``failure`` is the last answer, after those before it."""
        if self._input_refused:
            return
        self._input_refused = True
        broken = self._incoming
        if isinstance(broken, Exchange):
            broken.refuse(failure)
            broken.keep_alive = False
            if broken is self._active:
                broken.start()
            elif not broken.response_complete:
                self._received.add(broken)
            return
        self._last_answer = failure
        if broken is not None and self.pipeline:
            # The application has not seen it, and must not wait for its body.
            self.pipeline.popleft()
        elif broken is not None or self.cycle is None or self.cycle.response_complete:
            self._close_with_last_answer()

    def _close_with_last_answer(self) -> None:
        failure = self._last_answer
        if failure is None or self.transport.is_closing():
            return
        self._gateway.totals.outcomes["unknown", failure.code] += 1
        request_id = request_id_of(None)
        self.transport.write(failure.answer(request_id, b"", keep_alive=False))
        with suppress(OSError):
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def on_response_complete(self) -> None:
        if self._last_answer is None or self.pipeline:
            super().on_response_complete()
        else:
            self._close_with_last_answer()

    # -- the transport's callbacks -------------------------------------------------------------

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override] # as uvicorn
        super().connection_made(self._gateway.writes.batched(transport, to_client=True))
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
        if self.pipeline or self._last_answer is not None or self.transport.is_closing():
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


def _failure_of(error: httptools.HttpParserError) -> Failure:
    """How the client is told; an exception of a callback is the error's context."""
    cause = error.__context__
    if isinstance(cause, RefusedByGateway):
        return cause.failure
    if isinstance(error, httptools.HttpParserCallbackError) and not isinstance(
        cause, httptools.HttpParserError | UnicodeError
    ):
        log.error("a request could not be read", exc_info=cause)
    return INVALID_HTTP
