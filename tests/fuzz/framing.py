"""Requests with a hostile length, chunk or size: a server refuses them before it reads the body."""

from collections.abc import Iterator
from typing import NamedTuple

# One byte more than the node and the gateway read.
TOO_MUCH = 32 * 2**20 + 1


class Framed(NamedTuple):
    """A whole request, and the name of its fault."""

    name: str
    request: bytes


def _request(path: str, *lines: str, body: bytes = b"{}") -> bytes:
    head = (f"POST {path} HTTP/1.1", "Host: h", "Content-Type: application/json", *lines)
    return "\r\n".join([*head, "", ""]).encode() + body


def framed(path: str) -> Iterator[Framed]:
    """POSTs to ``path`` that every server must refuse."""
    for length in ("-1", "+2", "0x2", "2,2", "2 2", "1e1", "٢", "9" * 5000, "18446744073709551616"):
        yield Framed(f"a length of {length[:20]}", _request(path, f"Content-Length: {length}"))
    yield Framed("two lengths", _request(path, "Content-Length: 2", "Content-Length: 3"))
    chunked = "Transfer-Encoding: chunked"
    yield Framed("a length and chunks", _request(path, "Content-Length: 2", chunked))
    for size in (b"zz", b"-2", b"0x2", b"f" * 17, b"", b"2 2"):
        body = size + b"\r\n{}\r\n0\r\n\r\n"
        yield Framed(f"a chunk of {size!r}", _request(path, chunked, body=body))
    yield Framed("a chunk of the wrong size", _request(path, chunked, body=b"1\r\n{}\r\n0\r\n\r\n"))
    yield Framed("another coding", _request(path, "Transfer-Encoding: gzip"))
    yield Framed("a folded header", _request(path, "Content-Length: 2", "X: a", " b"))
    yield Framed("a header without a name", _request(path, ": x", "Content-Length: 2"))
    yield Framed("a NUL in a header", _request(path, "X: a\0b", "Content-Length: 2"))


def too_large(path: str) -> Iterator[Framed]:
    """Bodies above the limit in bytes, with and without a Content-Length."""
    blanks = b" " * TOO_MUCH
    yield Framed(
        f"{path}: too many bytes", _request(path, f"Content-Length: {TOO_MUCH}", body=blanks)
    )
    chunk = b"%x\r\n%s\r\n" % (TOO_MUCH, blanks)
    chunked = _request(path, "Transfer-Encoding: chunked", body=chunk + b"0\r\n\r\n")
    yield Framed(f"{path}: too many bytes in a chunk", chunked)
