"""The rules of HTTP that uvicorn leaves out: sizes, framing, Upgrade, targets, HTTP/1.0 clients."""

import re
from collections.abc import Sequence
from typing import Any

import httptools

from proofserve.gateway.answer import Header, Values
from proofserve.gateway.failures import HEADERS_TOO_LARGE, INVALID_HTTP, RefusedByGateway

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
        if values[b"transfer-encoding"].lower() != b"chunked":
            raise RefusedByGateway(_OTHER_CODING)
        if version != "1.1":
            # RFC 9112, section 6.1: the framing of such a request is faulty.
            raise RefusedByGateway(INVALID_HTTP.saying("HTTP/1.0 has no Transfer-Encoding."))
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
    path = _NEEDLESS_ESCAPE.sub(lambda escape: bytes.fromhex(escape[1].decode()), path)
    return path + mark + query, host


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
