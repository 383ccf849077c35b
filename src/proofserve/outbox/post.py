"""One attempt to deliver a callback to its target."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from proofserve.outbox.allowlist import Allowlist
from proofserve.outbox.deliveries import Delivery
from proofserve.outbox.transport import CheckedTransport, Resolve, resolve
from proofserve.wire.signature import (
    KEY_HEADER,
    SEQUENCE_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    Envelope,
)

# A large body gets more time: a million artifacts have about 65 MB. Bytes per second.
_SLOWEST_UPLOAD = 1_000_000

# Kept bytes of an error response, and characters of a redirect's target.
_EXCERPT = 300


@dataclass(frozen=True, slots=True)
class Outward:
    """Where callbacks may go, and the secret that signs them; None for no signature.

    ``clock`` gives wall-clock seconds.
    """

    allowlist: Allowlist = field(default_factory=Allowlist)
    secret: bytes | None = field(default=None, repr=False)
    resolve: Resolve = resolve
    clock: Callable[[], float] = time.time


def new_client(outward: Outward) -> httpx.AsyncClient:
    """A client that connects to allowed addresses only, without redirects and proxies."""
    transport = CheckedTransport(outward.allowlist, outward.resolve)
    # httpx's timeout starts again with every byte; ``post`` limits the whole attempt.
    return httpx.AsyncClient(
        transport=transport,
        timeout=None,  # noqa: S113
        follow_redirects=False,
        trust_env=False,
    )


async def post(
    client: httpx.AsyncClient, outward: Outward, delivery: Delivery, body: bytes, timeout_s: float
) -> str | None:
    """POST ``body``. Returns the error, or None if the target answered with a 2xx status.

    A redirect is an error: it is not followed, so no receiver has the callback. The target has
    ``timeout_s`` seconds, and another second for each megabyte of the body.
    """
    headers = {
        "Content-Type": "application/json",
        KEY_HEADER: delivery.key,
        SEQUENCE_HEADER: str(delivery.sequence),
        **await _signature(outward, delivery, body),
    }
    url = f"{delivery.url}/{delivery.endpoint}"
    allowed_s = timeout_s + len(body) / _SLOWEST_UPLOAD
    accepted = False
    error = None
    try:
        async with (
            asyncio.timeout(allowed_s),
            client.stream("POST", url, content=body, headers=headers) as response,
        ):
            accepted = response.is_success
            if not accepted:
                detail = _redirect(response, delivery.endpoint) or await _excerpt(response)
                error = f"HTTP {response.status_code}: {detail}"
    except TimeoutError:
        error = f"no answer within {allowed_s:.1f} s"
    except (httpx.HTTPError, httpx.InvalidURL) as problem:
        error = f"{type(problem).__name__}: {problem}"
    # After a 2xx status, an error in the rest of the answer does not matter.
    return None if accepted else error


async def _signature(outward: Outward, delivery: Delivery, body: bytes) -> dict[str, str]:
    if outward.secret is None:
        return {}
    now = int(outward.clock())
    envelope = Envelope(delivery.endpoint, delivery.key, delivery.sequence, now)
    # In a thread: a body of a million artifacts would block the loop for a tenth of a second.
    signature = await asyncio.to_thread(envelope.sign, outward.secret, body)
    return {TIMESTAMP_HEADER: str(now), SIGNATURE_HEADER: signature}


def _redirect(response: httpx.Response, endpoint: str) -> str | None:
    """Where a redirect leads and what to do about it; None for any other answer."""
    if not response.has_redirect_location:
        return None
    location = response.headers["location"]
    try:
        location = str(response.url.join(location))
    except httpx.InvalidURL:
        return f"redirects to {location[:_EXCERPT]!r}, which is not an address"
    base = location.removesuffix(f"/{endpoint}")
    return (
        f"redirects to {location[:_EXCERPT]}; redirects are not followed:"
        f" configure {base[:_EXCERPT]} as the callback URL"
    )


async def _excerpt(response: httpx.Response) -> str:
    text = b""
    with contextlib.suppress(httpx.HTTPError):
        async for chunk in response.aiter_raw():
            text += chunk
            if len(text) >= _EXCERPT:
                break
    return text[:_EXCERPT].decode(errors="replace").strip()
