"""Answers for HTTP/1.0 clients, which know no chunks: the end of the connection ends the answer."""

from typing import Any

import httptools


class CloseDelimited:
    """Writes chunked answers without their chunks; passes all other calls to ``writer``."""

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
