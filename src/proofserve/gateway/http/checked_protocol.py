"""uvicorn's protocol with the rules of HTTP that it leaves out: Upgrade, limits, framing, errors.

A request that breaks a rule gets one answer in OpenAI's shape, and then the connection closes:
where its body ends is not known, so nothing after it can be trusted to be a request.
"""

import logging
import re
from asyncio import Transport
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proofserve.gateway.failures import (
    HEADERS_TOO_LARGE,
    INVALID_HTTP,
    NOT_IMPLEMENTED,
    Failure,
    RefusedByGateway,
)
from proofserve.gateway.relay.attempts import Header, Values
from proofserve.gateway.relay.gateway import Gateway
from proofserve.web import request_id_of

log = logging.getLogger(__name__)
# The most that one read of a socket brings, bytes: a body's end may come with the next head.
READ_BYTES = 256 * 1024
# For the client to read a refusal while its own data is still arriving, seconds. A connection that
# is closed with unread data is reset, and the refusal is lost.
LINGER_S = 1.0
# Fields behind the last chunk are not headers (RFC 9110, section 6.5.1): they are dropped.
TRAILERS: Any = deque(maxlen=0)


class CloseDelimited:
    """Answers for HTTP/1.0 clients, which know no chunks: the end of the connection ends them.

    Writes chunked answers without their chunks; passes all other calls to ``writer``.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._parser = httptools.HttpResponseParser(self)
        self._reason = b""
        self._lines: list[bytes] = []
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def write(self, data: bytes) -> None:
        self._parser.feed_data(data)
        parts, self._parts = self._parts, []
        if parts:
            self._writer.write(b"".join(parts))

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in (b"connection", b"keep-alive", b"transfer-encoding"):
            self._lines.append(b"%s: %s\r\n" % (name, value))

    def on_headers_complete(self) -> None:
        lines = b"".join(self._lines)
        status = b"%d %s" % (self._parser.get_status_code(), self._reason)
        self._parts.append(b"HTTP/1.1 %s\r\n%sconnection: close\r\n\r\n" % (status, lines))
        self._reason = b""
        self._lines.clear()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)


class CheckedProtocol(HttpToolsProtocol):
    """One connection of a client. Requests go to uvicorn unless a subclass takes them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._gateway: Gateway = self.app_state["gateway"]
        # Bytes of the latest read, and all since the read that brought the beginning of the
        # current head or the latest part of a body: those of a head, or of trailers.
        self._read = self._arrived = 0
        # The cycle whose body is arriving.
        self.incoming: Any = None
        # Set once input is refused: what follows is not read as HTTP.
        self._input_refused = False
        # The answer to refused input, after the answers to the requests before it.
        self.last_answer: Failure | None = None

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
            self._refuse(_failure_of(error))
        else:
            if self._arrived > MAX_HEAD_BYTES + READ_BYTES:
                self._refuse(HEADERS_TOO_LARGE)

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
        """Check the head, and pass the request on.

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
        self.head_received(method, version, headers, values)
        self.incoming = self.cycle

    def head_received(
        self, _method: bytes, version: str, headers: Sequence[Header], _values: Values
    ) -> None:
        """Begin a request whose target is ``self.url``; its cycle becomes ``self.cycle``."""
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

    # -- refused input ---------------------------------------------------------------------------

    def _refuse(self, failure: Failure) -> None:
        """Read no more requests. ``failure`` is the last answer, after those before it."""
        if self._input_refused:
            return
        self._input_refused = True
        self.refuse_incoming(failure)

    def refuse_incoming(self, failure: Failure) -> None:
        """Answer with ``failure`` in the place of the request that is arriving, or as the last."""
        self.last_answer = failure
        if self.incoming is not None and self.pipeline:
            # The application has not seen it, and must not wait for its body.
            self.pipeline.popleft()
        elif self.incoming is not None or self.cycle is None or self.cycle.response_complete:
            self._close_with_last_answer()

    def _close_with_last_answer(self) -> None:
        failure = self.last_answer
        if failure is None or self.transport.is_closing():
            return
        self._gateway.totals.outcomes["unknown", failure.code] += 1
        request_id = request_id_of(None)
        self.transport.write(failure.answer(request_id, b"", keep_alive=False))
        with suppress(OSError):
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def on_response_complete(self) -> None:
        if self.last_answer is None or self.pipeline:
            super().on_response_complete()
        else:
            self._close_with_last_answer()


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


# Documented in docs/gateway.md. Bytes count the target, the names and the values.
MAX_HEADERS = 128
MAX_HEAD_BYTES = 64 * 1024

_USUAL_CONNECTION = frozenset({None, b"close", b"keep-alive"})
_NOT_ONE_HOST = INVALID_HTTP.saying("HTTP/1.1 needs exactly one Host header.")
_OTHER_CODING = INVALID_HTTP.saying("The only Transfer-Encoding that is supported is chunked.")
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)([^?#]*)([^#]*)", re.IGNORECASE)
# An unreserved character (RFC 3986, section 2.3) that need not be encoded: both mean the same.
_NEEDLESS_ESCAPE = re.compile(rb"%(2[DE]|3[0-9]|4[1-9A-F]|5[0-9AF]|6[1-9A-F]|7[0-9AE])", re.I)


def checked_headers(version: str, headers: Sequence[Header]) -> tuple[Sequence[Header], Values]:
    """``headers`` without those that ``Connection`` names (they are for the gateway only).

    With them the values of all by name. Raises RefusedByGateway if a rule of HTTP is broken: the
    body's length cannot be trusted.
    """
    if len(headers) > MAX_HEADERS:
        raise RefusedByGateway(HEADERS_TOO_LARGE)
    values = dict(headers)
    if len(values) < len(headers):
        values = _joined(headers)
    if b"transfer-encoding" in values:
        _check_coding(version, values[b"transfer-encoding"])
    if b"host" not in values and version == "1.1":
        raise RefusedByGateway(_NOT_ONE_HOST)
    if values.get(b"connection") not in _USUAL_CONNECTION:
        named = {token.strip() for token in values[b"connection"].lower().split(b",")}
        headers = [header for header in headers if header[0] not in named]
    return headers, values


def _joined(headers: Sequence[Header]) -> dict[bytes, bytes]:
    """Values of one name become one, separated by commas (RFC 9110, section 5.3)."""
    values: dict[bytes, bytes] = {}
    for name, value in headers:
        if name not in values:
            values[name] = value
        elif name == b"host":
            raise RefusedByGateway(_NOT_ONE_HOST)
        else:
            values[name] += b", " + value
    return values


def _check_coding(version: str, coding: bytes) -> None:
    if coding.lower() != b"chunked":
        raise RefusedByGateway(_OTHER_CODING)
    if version != "1.1":
        # RFC 9112, section 6.1: the framing of such a request is faulty.
        raise RefusedByGateway(INVALID_HTTP.saying("HTTP/1.0 has no Transfer-Encoding."))


def check_size(target: bytes, headers: Sequence[Header]) -> None:
    """Raise RefusedByGateway for a head that is larger than ``MAX_HEAD_BYTES``."""
    if len(target) + sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
        raise RefusedByGateway(HEADERS_TOO_LARGE)


def without_upgrade(method: bytes, target: bytes, version: str, headers: Sequence[Header]) -> bytes:
    """The same head without ``Upgrade``. Everything that frames the body stays as it is."""
    kept = b"".join(b"%s: %s\r\n" % header for header in headers if header[0] != b"upgrade")
    return b"%s %s HTTP/%s\r\n%s\r\n" % (method, target, version.encode(), kept)


def origin_form(target: bytes) -> tuple[bytes, bytes | None]:
    """A target as path and query, and the host of an absolute one (RFC 9112, section 3.2.2)."""
    host = None
    if absolute := _ABSOLUTE.fullmatch(target.partition(b"#")[0]):
        host = absolute[1]
        target = (absolute[2] or b"/") + absolute[3]
    path, mark, query = target.partition(b"?")
    return _NEEDLESS_ESCAPE.sub(_decoded, path) + mark + query, host


def _decoded(escape: "re.Match[bytes]") -> bytes:
    return bytes.fromhex(escape[1].decode())
