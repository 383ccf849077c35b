"""Checks that a callback is signed with the shared secret, and that the signature is fresh."""

import asyncio
import time
from collections.abc import Callable

from fastapi import Request

from proofserve.wire.signature import (
    KEY_HEADER,
    SEQUENCE_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    Envelope,
)

# Limit of the clocks' difference plus the time to send a large body. Seconds.
MAX_AGE_S = 300.0


class BadSignature(Exception):
    """A callback is not signed as this receiver requires; the text says what is wrong."""


class SignatureCheck:
    """Checks the signatures of callbacks. ``clock`` gives wall-clock seconds."""

    def __init__(
        self, secret: bytes, clock: Callable[[], float] = time.time, max_age_s: float = MAX_AGE_S
    ) -> None:
        self._secret = secret
        self._clock = clock
        self._max_age_s = max_age_s

    def headers(self, request: Request) -> tuple[Envelope, str]:
        """What was signed, and the signature; the body is not read yet. Raises BadSignature."""
        headers = request.headers
        signature = headers.get(SIGNATURE_HEADER)
        key = headers.get(KEY_HEADER)
        timestamp = _whole(headers.get(TIMESTAMP_HEADER))
        sequence = _whole(headers.get(SEQUENCE_HEADER))
        if signature is None or key is None or timestamp is None or sequence is None:
            raise BadSignature(
                "this receiver accepts signed callbacks only: set POC_CALLBACK_SECRET on the node"
            )
        age = self._clock() - timestamp
        if abs(age) > self._max_age_s:
            raise BadSignature(
                f"signed {age:.0f} s ago, the limit is {self._max_age_s:.0f} s:"
                " compare the clocks of node and receiver"
            )
        endpoint = request.url.path.rsplit("/", 1)[-1]
        return Envelope(endpoint, key, sequence, timestamp), signature

    async def body(self, envelope: Envelope, signature: str, body: bytes) -> None:
        """Raise BadSignature unless the signature is that of ``body`` under the secret."""
        if not await asyncio.to_thread(envelope.matches, self._secret, body, signature):
            raise BadSignature("the signature was made with another secret or for another callback")


def _whole(text: str | None) -> int | None:
    # At most the digits of a 64-bit number: int() is slow for a long text.
    return int(text) if text is not None and text.isdecimal() and len(text) <= 19 else None
