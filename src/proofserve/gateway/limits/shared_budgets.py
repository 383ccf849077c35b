"""Gateways tell each other through Redis what their clients used (ADR 39)."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from proofserve.gateway.limits.shared_window import SECONDS, SharedWindow, window_end

_logger = logging.getLogger(__name__)

# The hash of a minute: a field for each window, with what all gateways have used.
KEY = "proofserve:limits:{:.0f}"
# Seconds between two messages while clients use something, between two looks at what the other
# gateways' clients used, and after a failure; and the longest that Redis may take to answer.
SEND_EVERY_S = 0.02
LOOK_EVERY_S = 0.25
REST_S = 1.0
ANSWER_S = 1.0


class SharedBudgets:
    """The windows of one gateway that others spend, too; up to date while ``run`` runs.

    ``url`` is that of Redis, redis://[USER:PASSWORD@]HOST[:PORT][/NUMBER] or rediss://. Raises
    ValueError if it is not valid, or redis is not installed.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        self._redis, self._errors = _client(url)
        self._clock = clock
        self._windows: dict[str, SharedWindow] = {}
        self._changed: dict[str, None] = {}
        self._wake = asyncio.Event()
        self.up = True
        """Whether the newest message reached Redis."""

    def window(self, name: str, limit: int) -> SharedWindow:
        made = self._windows[name] = SharedWindow(name, limit, self._clock, self._note)
        return made

    async def run(self) -> None:
        """Send what is used here, and learn what is used elsewhere, until cancelled."""
        now = asyncio.get_running_loop().time
        look_at = now()
        task = asyncio.current_task()
        try:
            # Redis' client sends by asyncio.wait_for, which up to Python 3.11 may lose the
            # cancellation that comes as the sending ends.
            while task is None or not task.cancelling():
                looks = now() >= look_at
                if looks:
                    look_at = now() + LOOK_EVERY_S
                self._tell(await self._exchange(looks))
                await asyncio.sleep(SEND_EVERY_S if self.up else REST_S)
                await self._until_changed()
        finally:
            # What the last requests used counts for the other gateways, too.
            await self._exchange(looks=False)
            await self._redis.aclose()

    async def _until_changed(self) -> None:
        try:
            async with asyncio.timeout(LOOK_EVERY_S):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _exchange(self, looks: bool) -> str | None:
        """Send what was used and learn the sums. Returns why it failed, None if it did not."""
        end = window_end(self._clock())
        names, self._changed = list(self._changed), {}
        self._wake.clear()
        amounts = {name: self._windows[name].unsent(end) for name in names}
        sent = {name: amount for name, amount in amounts.items() if amount}
        if not sent and not looks:
            return None
        try:
            async with asyncio.timeout(ANSWER_S):
                sums, seen = await self._ask(KEY.format(end), sent, looks)
        except self._errors as error:
            for name, amount in sent.items():
                self._windows[name].not_sent(amount, end)
                self._changed[name] = None
            return str(error) or type(error).__name__
        for name, total in [*seen.items(), *sums.items()]:
            if name in self._windows:
                self._windows[name].learn(total, end)
        return None

    async def _ask(
        self, key: str, sent: dict[str, int], looks: bool
    ) -> tuple[dict[str, int], dict[str, int]]:
        """The sums of the windows in ``sent`` after it was added, and all sums if ``looks``.

        Raises the client's errors and ValueError.
        """
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name, amount in sent.items():
                pipeline.hincrby(key, name, amount)
            if sent:
                # Clocks may differ: the minute has ended everywhere by then.
                pipeline.expire(key, int(2 * SECONDS))
            if looks:
                pipeline.hgetall(key)
            answers = await pipeline.execute()
        seen = answers[-1] if looks else {}
        return dict(zip(sent, answers, strict=False)), {n: int(seen[n]) for n in seen}

    def _note(self, name: str) -> None:
        self._changed[name] = None
        self._wake.set()

    def _tell(self, failure: str | None) -> None:
        """Log the first failure, and its end."""
        if failure is not None and self.up:
            text = "limits are not shared, this gateway counts alone: Redis does not answer (%s)"
            _logger.error(text, failure)
        if failure is None and not self.up:
            _logger.info("limits are shared again")
        self.up = failure is None


def require_valid(url: str) -> None:
    """Raise ValueError for a URL that is not one of Redis, and if redis is not installed."""
    _client(url)


def _client(url: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """A client of Redis that never tries again by itself, and what may go wrong with it."""
    try:
        # Only gateways that share limits need it.
        from redis.asyncio import Redis  # noqa: PLC0415
        from redis.asyncio.retry import Retry  # noqa: PLC0415
        from redis.backoff import NoBackoff  # noqa: PLC0415
        from redis.exceptions import RedisError  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{error.name} is not installed: pip install 'proofserve[shared-limits]'"
        ) from None
    try:
        # An addition that was repeated would count twice.
        client = Redis.from_url(
            url, decode_responses=True, socket_connect_timeout=ANSWER_S, retry=Retry(NoBackoff(), 0)
        )
    except ValueError as error:
        raise ValueError(f"VLLM_SHARED_LIMITS: {error}") from None
    # A sum that is no number: another program writes to this hash.
    return client, (RedisError, OSError, TimeoutError, ValueError)
