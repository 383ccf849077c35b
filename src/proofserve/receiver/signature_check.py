"""Takes callbacks only from who knows the secret, and only while they are fresh."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from proofserve.wire.signature import (
    KEY_HEADER,
    SEQUENCE_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    Envelope,
)

# How far the sender's clock may be from ours, with the time that a large body takes. Seconds.
MAX_AGE_S = 300.0

_log = logging.getLogger(__name__)


class SignatureCheck:
    """Checks the signatures of callbacks. ``clock`` gives wall-clock seconds."""

    def __init__(
        self, secret: bytes, clock: Callable[[], float] = time.time, max_age_s: float = MAX_AGE_S
    ) -> None:
        self._secret = secret
        self._clock = clock
        self._max_age_s = max_age_s

    async def complaint(self, request: Request) -> str | None:
        """What is wrong with the signature of a callback, None if nothing is."""
        headers = request.headers
        signature = headers.get(SIGNATURE_HEADER)
        key = headers.get(KEY_HEADER)
        timestamp = _whole(headers.get(TIMESTAMP_HEADER))
        sequence = _whole(headers.get(SEQUENCE_HEADER))
        if signature is None or key is None or timestamp is None or sequence is None:
            return "this receiver takes signed callbacks only: give the node POC_CALLBACK_SECRET"
        age = self._clock() - timestamp
        # Before the body is read: what is too old need not be sent to its end.
        if abs(age) > self._max_age_s:
            return (
                f"signed {age:.0f} s ago, allowed are {self._max_age_s:.0f}: are both clocks right?"
            )
        endpoint = request.url.path.rsplit("/", 1)[-1]
        envelope = Envelope(endpoint, key, sequence, timestamp)
        body = await request.body()
        if not await asyncio.to_thread(envelope.matches, self._secret, body, signature):
            return "the signature is of another secret or another callback"
        return None


def sealed(seal: SignatureCheck) -> type[APIRoute]:
    """A route class that answers 401 to every POST whose signature ``seal`` does not accept."""

    class SealedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            handle = super().get_route_handler()
            if "POST" not in self.methods:
                return handle

            async def answer(request: Request) -> Response:
                if (complaint := await seal.complaint(request)) is not None:
                    _log.warning("refused a callback: %s", complaint)
                    return JSONResponse({"detail": complaint}, 401)
                response: Response = await handle(request)
                return response

            return answer

    return SealedRoute


def _whole(text: str | None) -> int | None:
    # No more digits than a number of 64 bits has: int() takes its time for a long one.
    return int(text) if text is not None and text.isdecimal() and len(text) <= 19 else None
