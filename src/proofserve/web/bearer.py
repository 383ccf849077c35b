"""Bearer keys: how they are read from a request, and how they are kept."""

import hashlib
from collections.abc import Iterable


def bearer_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key in a request's Authorization header, in the bytes that the client sent.

    Empty, which is the key of no client, if the request has no bearer key or several Authorization
    headers. Names are in lower case.
    """
    found = [value for name, value in headers if name == b"authorization"]
    return key_of(found[0]) if len(found) == 1 else b""


def key_of(authorization: bytes) -> bytes:
    """The key in the value of an Authorization header (RFC 6750); empty if it has none.

    The scheme is matched without regard to case (RFC 9110).
    """
    return authorization[7:].strip() if authorization[:7].lower() == b"bearer " else b""


def digest(key: bytes) -> bytes:
    """What a server keeps of a key: no key stays in memory, and all digests are equally long."""
    return hashlib.blake2b(key).digest()
