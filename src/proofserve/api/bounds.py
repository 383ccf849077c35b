"""How much of the API one request, one caller and all waiting calls together may take."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Message

from proofserve.api.access import Caller
from proofserve.api.errors import BodyTooLarge, ClientGone, TooMany
from proofserve.api.strict import StrictRequest, holds_more_values
from proofserve.web.fixed_window import FixedWindow

# What waits has hardly ended sooner; it may well take longer. Seconds.
_WAIT_ENDS_S = 5.0
# Digits of a length that any request could have.
_DIGITS = 19
# Of each nonce: itself, and a claim of two fields in braces.
_VALUES_OF_NONCE = 4
# Of everything else in a body, with room for what is refused by name.
_VALUES_BESIDES = 1024
# Of a body without a list of nonces: several times its longest texts, in whatever spelling.
_BYTES_BESIDES = 256 * 1024


class Rates:
    """Counts the requests of each caller in windows of a minute, which begin with the first."""

    def __init__(self, per_minute: int = 6000) -> None:
        self._per_minute = per_minute
        self._windows: dict[str, FixedWindow] = {}

    def count(self, caller: Caller) -> None:
        """Count one request. Raises TooMany for one beyond the caller's limit."""
        most = caller.requests_per_minute or self._per_minute
        window = self._windows.setdefault(caller.name, FixedWindow(most))
        if not window.take():
            raise TooMany(
                f"{caller.name} may send {most} requests a minute"
                " (POC_REQUESTS_PER_MINUTE, or the key's own limit)",
                window.seconds_left,
            )


class Waits:
    """Counts the calls that wait for the engine with their connection open."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._open = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Wait for the length of a context. Raises TooMany if as many wait as may."""
        if self._open >= self._most:
            raise TooMany(
                f"{self._open} calls wait for their answer, limit is {self._most}"
                " (POC_MAX_OPEN_WAITS); without wait a job needs no open connection",
                _WAIT_ENDS_S,
            )
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1


async def with_body(request: Request, most: int, nonces: int) -> StrictRequest:
    """The same request with its body read: at most ``most`` bytes, and values for ``nonces``.

    Raises BodyTooLarge as soon as that is known, and ClientGone.
    """
    named = "POC_MAX_BODY_BYTES"
    if not nonces and most > _BYTES_BESIDES:
        most, named = _BYTES_BESIDES, "this call takes no list"
    too_large = BodyTooLarge(f"the body has more than {most} bytes ({named})")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > _DIGITS or int(announced) > most):
        raise too_large
    came = 0

    async def receive() -> Message:
        nonlocal came
        message = await request.receive()
        came += len(message.get("body", b""))
        if came > most:
            raise too_large
        return message

    counted = StrictRequest(request.scope, receive)
    try:
        # Kept by the request, whoever asks it for its body later.
        body = await counted.body()
    except ClientDisconnect:
        raise ClientGone("Client closed request") from None
    if holds_more_values(body, nonces * _VALUES_OF_NONCE + _VALUES_BESIDES):
        need = f"{nonces} nonces need (POC_MAX_QUEUED_NONCES)" if nonces else "this call takes"
        raise BodyTooLarge(f"the body has more values than {need}")
    return counted
