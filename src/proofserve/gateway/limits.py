"""What each client may use: keys, what a request may cost, and limits that gateways share (ADR 39).

Limits count in windows of a minute: a gateway's own, or those that several gateways spend together
and tell each other of through Redis.
"""

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from proofserve.gateway import failures
from proofserve.gateway.failures import Failure
from proofserve.gateway.records import ClientSpec
from proofserve.web import MINUTE_S, FixedWindow, digest

_logger = logging.getLogger(__name__)

# Tokens reserved for an answer if the request has no limit.
USUAL_ANSWER = 1024
UNLIMITED = (None, None, None)
# Bytes of a conversation that choose the backend, for its prefix cache.
PREFIX_BYTES = 1024
# The beginning of a list of texts, or of a list of lists of tokens.
_LIST = re.compile(rb'\[\s*(["\[])')
# The field "model" of a form (RFC 7578), and how many places that look like its beginning are read.
_MODEL_BEGINS = b' name="model"'
_MODEL = re.compile(
    rb' name="model"[^\r\n]{0,80}(?:\r\n[^\r\n]{1,200}){0,4}\r\n\r\n([^\r\n]{1,400})\r\n--'
)
_PLACES = 16
# Larger than any real limit. Python cannot print a product of numbers with thousands of digits.
Count = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
# No request is matched with this key.
ANONYMOUS = ClientSpec(name="anonymous", key="none")
# The hash of a minute: a field for each window, with what all gateways have used.
KEY = "proofserve:limits:{:.0f}"
# Seconds between two messages while clients use something, between two looks at what the other
# gateways' clients used, and after a failure; and the longest that Redis may take to answer.
SEND_EVERY_S = 0.02
LOOK_EVERY_S = 0.25
REST_S = 1.0
ANSWER_S = 1.0


class RequestFields(msgspec.Struct, gc=False):
    """What decides where a request goes and what it may cost. The prompt stays raw JSON."""

    model: str | None = None
    stream: bool | None = False
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    max_output_tokens: Count | None = None
    n: Count | None = 1
    system: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    def most_tokens(self, size: int) -> int:
        """The most tokens that a body of ``size`` bytes may cost.

        No token is shorter than a byte. Each endpoint has its own name for the limit and ignores
        the other names, so the largest counts. A negative limit, which backends refuse, counts 0.
        """
        limits = (self.max_completion_tokens, self.max_tokens, self.max_output_tokens)
        first, second, third = limits
        named = max(0, first or 0, second or 0, third or 0)
        longest = USUAL_ANSWER if limits == UNLIMITED else named
        return size + longest * max(1, self.n or 1) * (self._prompts() if self.prompt else 1)

    def _prompts(self) -> int:
        kind = _LIST.match(self.prompt)
        if kind is None:
            # A text, or a list of numbers, which is one prompt in tokens.
            return 1
        # Counted, not parsed: parsing ten million short prompts takes seconds and a gigabyte.
        text = bytes(self.prompt)
        if kind[1] == b"[":
            return text.count(b"[") - 1
        # Two quotes for each prompt, besides escaped ones. A pair of backslashes escapes nothing.
        text = text.replace(rb"\\", b"")
        return (text.count(b'"') - text.count(rb"\"")) // 2

    def beginning(self, length: int = PREFIX_BYTES) -> bytes:
        """The first bytes of the conversation: requests that share them share a prefix cache."""
        own = self.messages or self.prompt or self.input
        return (bytes(self.system) + bytes(own) if self.system else bytes(own))[:length]


# Not strict, because backends also accept "8" as a number.
_DECODER = msgspec.json.Decoder(RequestFields, strict=False)


def read_body(body: bytes | bytearray) -> RequestFields:
    """Raises ValueError with a message for the client that names the wrong field."""
    if not body:
        raise ValueError("The request body is empty.")
    try:
        return _DECODER.decode(body)
    except RecursionError as error:
        raise ValueError("The request body is nested too deeply.") from error
    except msgspec.ValidationError as error:
        raise ValueError(f"The request body has a wrong value: {error}.") from error
    except ValueError as error:
        raise ValueError(f"The request body is not valid JSON: {error}.") from error


def read_form(body: bytes | bytearray) -> RequestFields:
    """What a body of ``multipart/form-data`` says about where it goes; its files stay unread."""
    at = -1
    for _ in range(_PLACES):
        at = body.find(_MODEL_BEGINS, at + 1)
        if at < 0:
            break
        if found := _MODEL.match(body, at):
            return RequestFields(found[1].decode(errors="replace"))
    return RequestFields()


# A window by its name, which is the same in every gateway with these keys, and its limit.
NewWindow = Callable[[str, int], FixedWindow]


# Tokens set aside for one request, and the end of the window that they were taken from.
Charge = tuple[int, float]
NOTHING: Charge = (0, 0.0)


class Client:
    """One key's share. Every ``admit`` that did not refuse is followed by one ``settle``."""

    def __init__(self, spec: ClientSpec, new_window: NewWindow) -> None:
        self.name = spec.name
        self.in_flight = 0
        self.refused: Counter[str] = Counter()
        """Requests that one of its limits refused, by code, for the dashboard."""
        self._concurrency = spec.concurrency
        requests, tokens = spec.requests_per_minute, spec.tokens_per_minute
        self._requests = new_window(f"{spec.name}:requests", requests) if requests else None
        self._tokens = new_window(f"{spec.name}:tokens", tokens) if tokens else None

    def admit(self, fields: RequestFields, size: int | None) -> Charge | Failure:
        """The charge of a request of ``size`` bytes, or the failure that names the limit.

        A ``size`` of None is that of a request that costs no tokens.
        """
        if self._concurrency is not None and self.in_flight >= self._concurrency:
            return failures.TOO_MANY_AT_ONCE
        charge = NOTHING
        if self._tokens is not None and size is not None:
            # The most that the request may use. What it does not use comes back at its end.
            tokens = fields.most_tokens(size)
            if tokens > self._tokens.limit:
                return failures.BEYOND_BUDGET.saying(
                    f"This request may cost {tokens} tokens, and this key has "
                    f"{self._tokens.limit} per minute in all. Ask for fewer with max_tokens."
                )
            if not self._tokens.take(tokens):
                return failures.TOKEN_RATE.after(self._tokens.seconds_left)
            charge = (tokens, self._tokens.end)
        if self._requests is not None and not self._requests.take():
            if self._tokens is not None:
                self._tokens.give_back(*charge)
            return failures.REQUEST_RATE.after(self._requests.seconds_left)
        self.in_flight += 1
        return charge

    def settle(self, charge: Charge, used: int | None) -> None:
        """A request has ended. ``used`` is in tokens; None if unknown: then the charge stands."""
        self.in_flight -= 1
        if used is None or self._tokens is None:
            return
        set_aside, window_end = charge
        if used <= set_aside:
            self._tokens.give_back(set_aside - used, window_end)
        else:
            self._tokens.charge(used - set_aside)


class Clients:
    """All clients. Without keys every request is of one anonymous client without limits.

    ``new_window`` makes the windows of all limits; without it they are this gateway's own.
    """

    def __init__(
        self,
        specs: Sequence[ClientSpec],
        clock: Callable[[], float] = time.monotonic,
        new_window: NewWindow | None = None,
    ) -> None:
        new_window = new_window or (lambda _name, limit: FixedWindow(limit, clock))
        self.open = not specs
        self._anonymous = Client(ANONYMOUS, new_window)
        # By digest: the time of a look-up tells nothing about a key, and no key lies in memory.
        self._by_digest = {digest(s.key.encode()): Client(s, new_window) for s in specs}

    def find(self, key: bytes) -> Client | None:
        return self._anonymous if self.open else self._by_digest.get(digest(key))

    def all(self) -> list[Client]:
        return list(self._by_digest.values()) or [self._anonymous]


class SharedWindow(FixedWindow):
    """At most ``limit`` units in each whole minute of the clock, as far as this gateway knows.

    Several gateways spend them together. ``clock`` gives seconds since the epoch; ``changed`` gets
    ``name`` after each change that the others must learn.
    """

    __slots__ = ("_changed", "_unsent", "name")

    def __init__(
        self, name: str, limit: int, clock: Callable[[], float], changed: Callable[[str], None]
    ) -> None:
        super().__init__(limit, clock)
        self.name = name
        self._changed = changed
        self._unsent = 0

    def unsent(self, end: float) -> int:
        """What was used here in the window that ends at ``end`` and the others do not know.

        From now on they do, or ``not_sent`` says that they do not.
        """
        if end != self.end:
            return 0
        amount, self._unsent = self._unsent, 0
        return amount

    def not_sent(self, amount: int, end: float) -> None:
        if end == self.end:
            self._unsent += amount

    def learn(self, total: int, end: float) -> None:
        """All gateways together have used ``total`` in the window that ends at ``end``."""
        if end > self.end:
            self._open(end)
        if end == self.end:
            self._used = total + self._unsent

    def _begin(self, now: float) -> None:
        self._open(window_end(now))

    def _open(self, end: float) -> None:
        self.end = end
        self._used = self._unsent = 0

    def _count(self, amount: int) -> None:
        super()._count(amount)
        self._unsent += amount
        self._changed(self.name)


def window_end(now: float) -> float:
    """The end of the minute of ``now``, both in seconds since the epoch."""
    return (now // MINUTE_S + 1) * MINUTE_S


class SharedBudgets:
    """The windows of one gateway that others spend, too; up to date while ``run`` runs.

    ``url`` is that of Redis, redis://[USER:PASSWORD@]HOST[:PORT][/NUMBER] or rediss://. Raises
    ValueError if it is not valid, or redis is not installed.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        self._redis, self._errors = redis_client(url)
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
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._wake.wait()
        finally:
            # What the last requests used counts for the other gateways, too.
            await self._exchange(looks=False)
            await self._redis.aclose()

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
                totals = await self._ask(KEY.format(end), sent, looks)
        except self._errors as error:
            for name, amount in sent.items():
                self._windows[name].not_sent(amount, end)
                self._changed[name] = None
            return str(error) or type(error).__name__
        for name, total in totals.items():
            if name in self._windows:
                self._windows[name].learn(total, end)
        return None

    async def _ask(self, key: str, sent: dict[str, int], looks: bool) -> dict[str, int]:
        """Add ``sent`` and return the sums, all if ``looks``. Raises the client's errors."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name, amount in sent.items():
                pipeline.hincrby(key, name, amount)
            if sent:
                # Clocks may differ: the minute has ended everywhere by then.
                pipeline.expire(key, int(2 * MINUTE_S))
            if looks:
                pipeline.hgetall(key)
            answers = await pipeline.execute()
        seen = answers[-1] if looks else {}
        return {n: int(seen[n]) for n in seen} | dict(zip(sent, answers, strict=False))

    def _note(self, name: str) -> None:
        self._changed[name] = None
        self._wake.set()

    def _tell(self, failure: str | None) -> None:
        if failure is not None and self.up:
            text = "limits are not shared, this gateway counts alone: Redis does not answer (%s)"
            _logger.error(text, failure)
        if failure is None and not self.up:
            _logger.info("limits are shared again")
        self.up = failure is None


def redis_client(url: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """A client of Redis that never tries again by itself, and what may go wrong with it.

    Raises ValueError for a URL that is not one of Redis, and if redis is not installed.
    """
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
