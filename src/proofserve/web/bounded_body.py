"""Reading a request's body up to a limit."""

from typing import TypeVar

from starlette.requests import Request
from starlette.types import Message

# Digits of the largest length that a request could have.
_MAX_DIGITS = 19

R = TypeVar("R", bound=Request)


async def with_body(kind: type[R], request: Request, max_bytes: int, too_large: Exception) -> R:
    """``request`` as an object of class ``kind``, its body read and kept in it.

    Raises ``too_large`` as soon as the body is known to have more than ``max_bytes`` bytes: from
    its Content-Length, else while it is read. Raises ClientDisconnect.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > _MAX_DIGITS or int(announced) > max_bytes):
        raise too_large
    received = 0

    async def receive() -> Message:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > max_bytes:
            raise too_large
        return message

    bounded = kind(request.scope, receive)
    await bounded.body()
    return bounded
