"""Heads of relayed requests and answers, without the headers of one connection."""

import re
from collections.abc import Collection, Mapping, Sequence

# Headers of one hop (RFC 9110, section 7.6.1), and those that the gateway writes itself.
HOP_BY_HOP = frozenset(
    b"connection content-length expect host keep-alive proxy-authenticate proxy-authorization"
    b" proxy-connection te trailer transfer-encoding upgrade x-request-id".split()
)
_ONE_HOP = re.compile(rb"\r\n(?:connection|keep-alive|x-request-id):[^\r\n]*", re.IGNORECASE)
_CORS = re.compile(rb"\r\n(?:access-control-[a-z-]+|vary):[^\r\n]*", re.IGNORECASE)

Header = tuple[bytes, bytes]
# By name in lower case.
Values = Mapping[bytes, bytes]


def request_head(
    target: bytes,
    host: bytes,
    headers: Sequence[Header],
    dropped: Collection[bytes],
    length: int,
    own: bytes,
) -> bytes:
    """The head of a POST to a backend: ``headers`` without those named in ``dropped``.

    ``own`` are header lines of ours, ending with CRLF.
    """
    kept = b"".join([b"%s: %s\r\n" % header for header in headers if header[0] not in dropped])
    line = b"POST %s HTTP/1.1\r\nhost: %s\r\n%scontent-length: %d\r\n%s\r\n"
    return line % (target, host, kept, length, own)


def response_head(head: bytes, own: bytes, keep_alive: bool) -> bytes:
    """A backend's head as the client gets it, with ``own`` lines of ours.

    ``head`` comes without its final empty line.
    """
    close = b"" if keep_alive else b"connection: close\r\n"
    return b"%s\r\n%s%s\r\n" % (_ONE_HOP.sub(b"", head), own, close)


class CrossOrigin:
    """Which web pages may read answers. With no origins configured the backend decides."""

    def __init__(self, origins: Sequence[str]) -> None:
        self.configured = bool(origins)
        self._any = "*" in origins
        self._origins = {origin.encode() for origin in origins}

    def lines(self, origin: bytes | None) -> bytes:
        if origin is None or not (self._any or origin in self._origins):
            return b""
        return b"access-control-allow-origin: %s\r\nvary: Origin\r\n" % origin

    def strip(self, head: bytes) -> bytes:
        return _CORS.sub(b"", head) if self.configured else head
