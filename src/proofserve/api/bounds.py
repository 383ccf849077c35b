"""How much of the API one request, one caller and all waiting calls together may take."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request
from starlette.requests import ClientDisconnect

from proofserve.api.access import Caller
from proofserve.api.errors import BodyTooLarge, ClientGone, TooMany
from proofserve.api.strict import StrictRequest, holds_more_values
from proofserve.web.bounded_body import with_body
from proofserve.web.fixed_window import FixedWindow

# What waits has hardly ended sooner; it may well take longer. Seconds.
_WAIT_ENDS_S = 5.0
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


async def bounded(request: Request, max_bytes: int, nonces: int) -> StrictRequest:
    """``request`` with its body read: at most ``max_bytes``, and values for ``nonces`` nonces.

    Raises BodyTooLarge as soon as the body is known to be larger, and ClientGone.
    """
    setting = "POC_MAX_BODY_BYTES"
    if not nonces and max_bytes > _BYTES_BESIDES:
        max_bytes, setting = _BYTES_BESIDES, "this call takes no list"
    too_large = BodyTooLarge(f"the body has more than {max_bytes} bytes ({setting})")
    try:
        read = await with_body(StrictRequest, request, max_bytes, too_large)
    except ClientDisconnect:
        raise ClientGone("Client closed request") from None
    if holds_more_values(await read.body(), nonces * _VALUES_OF_NONCE + _VALUES_BESIDES):
        need = f"{nonces} nonces need (POC_MAX_QUEUED_NONCES)" if nonces else "this call takes"
        raise BodyTooLarge(f"the body has more values than {need}")
    return read
