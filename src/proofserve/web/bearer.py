"""Bearer keys: how they are read from a request, and how they are kept."""

import hashlib
from collections.abc import Iterable


def bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key in a request's Authorization header (RFC 6750), in the bytes that the client sent.

    The scheme is matched without regard to case (RFC 9110). Empty, which is the key of no client,
    if the request has no bearer key or several Authorization headers. Names are in lower case.
    """
    found = [value for name, value in headers if name == b"authorization"]
    if len(found) != 1:
        return b""
    scheme, _, key = found[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def digest(key: bytes) -> bytes:
    """What a server keeps of a key: no key stays in memory, and all digests are equally long."""
    return hashlib.sha256(key).digest()
