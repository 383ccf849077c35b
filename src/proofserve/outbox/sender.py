"""Posts callbacks until their targets acknowledge them or they expire."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

import httpx

from proofserve.outbox.callbacks import CallbackPolicy, Delivery, SendPlan
from proofserve.outbox.post import Outward, new_client, post
from proofserve.rounds.errors import OutboxUnavailable

T = TypeVar("T")

_log = logging.getLogger(__name__)


class CallbackStore(Protocol):
    """Where callbacks wait. Methods raise OutboxUnavailable, and the sender calls them again."""

    @property
    def news(self) -> asyncio.Event:
        """Set when there may be callbacks to post; the sender clears it."""
        ...

    async def plan(
        self, policy: CallbackPolicy, busy: frozenset[str] = frozenset(), flushing: bool = False
    ) -> SendPlan:
        """The callbacks to post now, none of them to a URL in ``busy``, and the wait after them.

        ``flushing`` makes every stored result due at once.
        """
        ...

    async def body(self, delivery: Delivery) -> bytes:
        """The same bytes for each attempt."""
        ...

    async def acknowledge(self, delivery: Delivery) -> None: ...

    async def fail(self, delivery: Delivery, error: str, pause_s: float | None) -> None:
        """Count a failed attempt; the next is due after ``pause_s``; None makes it expire."""
        ...


class CallbackSender:
    """Sends the callbacks of a store; ``run`` must be one task of the same event loop.

    Delivery is at least once: a callback whose acknowledgement was not stored is sent again under
    the same key. Each target has one post in flight and never waits for another target; a round's
    callbacks arrive in order. ``sleep`` waits seconds of the store's clock. Without ``outward``
    callbacks go to this machine only and are not signed.
    """

    def __init__(
        self,
        store: CallbackStore,
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
                plan = await self._retried(self._plan)
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

    async def _plan(self) -> SendPlan:
        return await self._store.plan(self._policy, frozenset(self._busy), self._flushing)

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
