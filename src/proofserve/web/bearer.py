"""Bearer keys: how they are read from a request, and how they are kept."""

import hashlib
from collections.abc import Sequence

from starlette.requests import HTTPConnection


def bearer_key(authorization: Sequence[bytes]) -> bytes:
    """The key in the values of a request's Authorization headers (RFC 6750).

    The scheme is matched without regard to case (RFC 9110). Empty, which is the key of no client,
    if the request has no bearer key or several Authorization headers.
    """
    if len(authorization) != 1:
        return b""
    scheme, _, key = authorization[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def key_of(connection: HTTPConnection) -> bytes:
    """The bearer key of a request as ``bearer_key`` reads it, in the bytes that the client sent."""
    headers = connection.scope["headers"]
    return bearer_key([value for name, value in headers if name == b"authorization"])


def digest(key: bytes) -> bytes:
    """What a server keeps of a key: no key stays in memory, and all digests are equally long."""
    return hashlib.sha256(key).digest()
