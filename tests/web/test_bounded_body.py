"""Bodies are read up to a limit."""

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from proofserve.web import with_body

pytestmark = pytest.mark.anyio


class _TooLargeError(Exception):
    pass


def request(*parts: bytes, length: str | None = None, leaves: bool = False) -> Request:
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.disconnect"} if leaves else {"type": "http.request"})
    remaining = iter(messages)

    async def receive() -> Message:
        return next(remaining)

    headers = [] if length is None else [(b"content-length", length.encode())]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def read(whole: Request, max_bytes: int) -> bytes:
    return await (await with_body(whole, max_bytes, _TooLargeError())).body()


async def test_a_body_within_the_limit_is_read() -> None:
    assert await read(request(b"ab", b"c"), 3) == b"abc"
    assert await read(request(), 0) == b""


@pytest.mark.parametrize(
    "large", [request(b"ab", b"cd"), request(length="4"), request(length="9" * 5000)]
)
async def test_a_larger_body_is_refused_announced_or_not(large: Request) -> None:
    with pytest.raises(_TooLargeError):
        await read(large, 3)


async def test_a_client_that_leaves_is_told_apart() -> None:
    with pytest.raises(ClientDisconnect):
        await read(request(b"a", leaves=True), 3)
