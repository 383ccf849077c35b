"""Posts callbacks until their targets acknowledge them or they expire."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from proofserve.outbox.allowlist import Allowlist, CheckedTransport, Resolve, resolve
from proofserve.outbox.planning import CallbackPolicy, CallbackStore, Delivery
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.wire.callbacks import (
    KEY_HEADER,
    SEQUENCE_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    Envelope,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

# A large body gets more time: a million artifacts have about 65 MB. Bytes per second.
_SLOWEST_UPLOAD = 1_000_000
# Kept bytes of an error response, and characters of a redirect's target.
_EXCERPT = 300


@dataclass(frozen=True, slots=True)
class Outward:
    """Where callbacks may go, and the secret that signs them, if any. ``clock``: Unix seconds."""

    allowlist: Allowlist = field(default_factory=Allowlist)
    secret: bytes | None = field(default=None, repr=False)
    resolve: Resolve = resolve
    clock: Callable[[], float] = time.time


class CallbackSender:
    """Sends the callbacks of a store; ``run`` must be one task of the same event loop.

    Delivery is at least once: a callback whose acknowledgement was not stored is sent again under
    the same key. Each target has one post in flight and never waits for another target; a round's
    callbacks arrive in order. ``sleep`` waits seconds of the store's clock. Without ``outward``
    callbacks go to this machine only and are not signed.
    """

    def __init__(
        self,
        store: CallbackStore[Any, Any],
        policy: CallbackPolicy,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
        outward: Outward | None = None,
    ) -> None:
        self._store = store
        self._policy = policy
        self._outward = outward or Outward()
        self._sleep = sleep
        self._busy: set[str] = set()
        self._flushing = False
        self._settled = asyncio.Event()
        self._empty = False

    async def run(self) -> None:
        """Send until cancelled. A callback in flight is then sent again after a restart."""
        async with new_client(self._outward) as client, asyncio.TaskGroup() as posts:
            while True:
                self._store.news.clear()
                plan = await self._retried(
                    lambda: self._store.plan(self._policy, frozenset(self._busy), self._flushing)
                )
                for delivery in plan.due:
                    self._busy.add(delivery.url)
                    posts.create_task(self._deliver(client, delivery))
                # News that came after the plan was made is not in it.
                if not (plan.due or self._busy or self._store.news.is_set()):
                    self._empty = plan.idle
                    self._settled.set()
                await self._wait(plan.wait_s)

    async def drain(self, timeout_s: float) -> bool:
        """Send all due callbacks and all results of open rounds, because the server ends.

        ``run`` must be running. Returns True once nothing is undelivered, and False after
        ``timeout_s`` seconds or when all undelivered callbacks wait for another attempt; these
        stay on disk for the next start.
        """
        self._settled.clear()
        self._flushing = True
        self._store.news.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError:
            return False
        else:
            return self._empty
        finally:
            self._flushing = False

    async def _wait(self, until_due_s: float | None) -> None:
        """Wait for news, until more is due, or until another process may have made more due."""
        longest_s = self._policy.look_again_s
        seconds = longest_s if until_due_s is None else min(until_due_s, longest_s)
        waits: set[asyncio.Future[object]] = {
            asyncio.ensure_future(self._store.news.wait()),
            asyncio.ensure_future(self._sleep(seconds)),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _deliver(self, client: httpx.AsyncClient, delivery: Delivery) -> None:
        try:
            body = await self._retried(lambda: self._store.body(delivery))
            error = await post(client, self._outward, delivery, body, self._policy.timeout_s)
            # The target stays busy until this is stored, so that no callback is posted twice.
            await self._retried(lambda: self._settle(delivery, error))
        finally:
            self._busy.discard(delivery.url)
            self._store.news.set()

    async def _settle(self, delivery: Delivery, error: str | None) -> None:
        if error is None:
            await self._store.acknowledge(delivery)
            return
        failures = delivery.attempts + 1
        where, known = _described(delivery), {"round_id": delivery.round_id}
        if self._policy.expires(failures):
            await self._store.fail(delivery, error, None)
            text = "callback to %s expired after %d attempts: %s"
            _log.warning(text, where, failures, error, extra=known)
            return
        pause_s = self._policy.pause_s(failures)
        await self._store.fail(delivery, error, pause_s)
        text = "callback to %s failed, again in %g s: %s"
        _log.info(text, where, pause_s, error, extra=known)

    async def _retried(self, step: Callable[[], Awaitable[T]]) -> T:
        """Run ``step`` until the outbox can do it: a full disk may have room later."""
        failures = 0
        while True:
            try:
                return await step()
            except OutboxUnavailable as error:
                failures += 1
                pause_s = self._policy.pause_s(failures)
                _log.warning("callbacks pause for %g s: %s", pause_s, error)
                await self._sleep(pause_s)


def _described(delivery: Delivery) -> str:
    """A delivery for a log line, without the password or token that its URL can hold."""
    try:
        parts = httpx.URL(delivery.url)
    except httpx.InvalidURL:
        where = "an invalid URL"
    else:
        where = str(parts.copy_with(userinfo=b"", query=None, fragment=None))
    of_round = f", round {delivery.round_id}" if delivery.round_id else ""
    return f"{where}/{delivery.endpoint}{of_round}, sequence {delivery.sequence}"


# -- one attempt -----------------------------------------------------------------------------------


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
    }
    if outward.secret is not None:
        now = int(outward.clock())
        envelope = Envelope(delivery.endpoint, delivery.key, delivery.sequence, now)
        # In a thread: a body of a million artifacts would block the loop for a tenth of a second.
        signature = await asyncio.to_thread(envelope.sign, outward.secret, body)
        headers |= {TIMESTAMP_HEADER: str(now), SIGNATURE_HEADER: signature}
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
