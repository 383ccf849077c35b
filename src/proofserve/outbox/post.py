"""One attempt to hand a callback to its target."""

import asyncio
import contextlib

import httpx

from proofserve.outbox.deliveries import Delivery

# A million artifacts are some 65 MB: a target gets this much more time for a large body. Bytes
# per second.
_SLOWEST_UPLOAD = 1_000_000

# How much of a refusal is kept, in bytes.
_EXCERPT = 300


def new_client() -> httpx.AsyncClient:
    """A client that follows neither redirects nor the environment's proxies."""
    # Its own timeout would start anew with every byte; each post has one for all of it.
    return httpx.AsyncClient(timeout=None, follow_redirects=False, trust_env=False)  # noqa: S113


async def post(
    client: httpx.AsyncClient, delivery: Delivery, body: bytes, timeout_s: float
) -> str | None:
    """POST ``body``; what went wrong, None when the target took it with a status below 400.

    The target has ``timeout_s`` seconds, and another for each megabyte of the body.
    """
    headers = {
        "Content-Type": "application/json",
        "Idempotency-Key": delivery.key,
        "X-Proofserve-Sequence": str(delivery.sequence),
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
            accepted = response.status_code < httpx.codes.BAD_REQUEST
            if not accepted:
                error = f"HTTP {response.status_code}: {await _excerpt(response)}"
    except TimeoutError:
        error = f"no answer within {allowed_s:.1f} s"
    except (httpx.HTTPError, httpx.InvalidURL) as problem:
        error = f"{type(problem).__name__}: {problem}"
    # Once the status said yes, trouble with the rest of the answer changes nothing.
    return None if accepted else error


async def _excerpt(response: httpx.Response) -> str:
    """The beginning of an answer, as far as it can be read."""
    text = b""
    with contextlib.suppress(httpx.HTTPError):
        async for chunk in response.aiter_raw():
            text += chunk
            if len(text) >= _EXCERPT:
                break
    return text[:_EXCERPT].decode(errors="replace").strip()
