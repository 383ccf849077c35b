"""Chats with a server: requests from seeds, lists and closed loops of them, streamed answers."""

import asyncio
import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, Generic, Self, TypeVar

import httpx
from anyio.from_thread import start_blocking_portal

from proofserve.remote.http import LONGEST_TEXT, TIMEOUT_S, reason_of, refusal, unless_exit
from proofserve.remote.prompts import WORDS, prompt

R = TypeVar("R")
# The finish reasons of requests that vLLM gave up before the model had finished.
FAILURES = frozenset({"abort", "error"})

ANSWER_TOKENS = 16
DATA = "data: "
END = "[DONE]"
# vLLM joins tokens in one event when the reader is slow, so each event must say how many came.
COUNTED = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


@dataclass(frozen=True, slots=True)
class Call:
    path: str
    body: Mapping[str, Any]


def chat(
    model: str, prompt: str, max_tokens: int, salt: str | None = None, ignore_eos: bool = True
) -> Call:
    """A greedy chat of exactly ``max_tokens`` tokens, or without ``ignore_eos`` at most so many.

    With another ``salt``, vLLM's prefix cache does not use what an earlier run computed. That would
    change the shape of a prefill, and with it the last bits of the logits.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "ignore_eos": ignore_eos,
    }
    return Call("/v1/chat/completions", {**body, "cache_salt": salt} if salt else body)


def chats(model: str, seeds: range, max_tokens: int, salt: str) -> list[Call]:
    return [chat(model, prompt(seed), max_tokens, salt) for seed in seeds]


def reading_chat(model: str, number: int, words: int, tokens: int = ANSWER_TOKENS) -> Call:
    """Chat ``number`` of an endless load: a long prompt and a short answer.

    It costs the engine much and the API process little. Lengths vary by half around ``words`` and
    ``tokens``: with equal ones the load would come in waves.
    """
    draw = random.Random(number)  # noqa: S311 - see above
    text = " ".join(draw.choices(WORDS, k=_uneven(draw, words)))
    return chat(model, f"{number} {text}", _uneven(draw, tokens))


def _uneven(draw: random.Random, mean: int) -> int:
    return draw.randint(max(1, mean // 2), mean + mean // 2)


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a call, in seconds of the monotonic clock.

    ``error`` says why the answer is missing or incomplete; ``response_id`` is the server's name for
    it.
    """

    texts: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int
    began: float
    ended: float
    error: str | None = None
    response_id: str | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def ask_all(
    url: str, calls: Sequence[Call], at_once: int, answered: Callable[[], None] = lambda: None
) -> list[Reply]:
    """Send ``calls``, at most ``at_once`` in flight; return replies in their order."""

    async def replies() -> list[Reply]:
        places = asyncio.Semaphore(at_once)
        asyncio.get_running_loop().set_exception_handler(unless_exit)

        async def ask(call: Call) -> Reply:
            async with places:
                reply = await ask_one(http, call)
                answered()
                return reply

        async with _http(url) as http:
            return await asyncio.gather(*(ask(call) for call in calls))

    return asyncio.run(replies())


async def ask_one(http: httpx.AsyncClient, call: Call) -> Reply:
    began = time.monotonic()
    try:
        response = await http.post(call.path, json=call.body)
    except httpx.TransportError as error:
        reason = f"{call.path}: {reason_of(error)}"
        return Reply((), 0, 0, began, time.monotonic(), reason)
    ended = time.monotonic()
    if response.is_error:
        return Reply((), 0, 0, began, ended, f"{call.path}: {refusal(response)}")
    body = response.json()
    choices, usage = body["choices"], body["usage"]
    texts = tuple(c["message"]["content"] if "message" in c else c["text"] for c in choices)
    broken = [c["finish_reason"] for c in choices if c["finish_reason"] in FAILURES]
    failure = f"finish_reason {broken[0]}" if broken else None
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    return Reply(texts, *counts, began, ended, failure, body.get("id"))


def _http(url: str) -> httpx.AsyncClient:
    # Nothing may limit how many calls are in flight. Each has a connection of its own: on a machine
    # that stands still the server could close an idle one at the moment in which a call is sent on
    # it, and that call would count as failed.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)


def rate_of_completions(
    replies: Sequence[Reply], skip: int, until: float, count: Callable[[Reply], int]
) -> float:
    """Tokens per second of a server that serves the requests of a closed loop one by one.

    Counts from completion to completion, because a request waits in the queue for most of its
    duration: from the ``skip``-th (those before it found no queue) to the first not before
    ``until``.
    """
    ordered = sorted(replies, key=lambda reply: reply.ended)
    begin, rest = ordered[skip - 1], ordered[skip:]
    counted = [reply for reply in rest if reply.ended < until]
    counted += rest[len(counted) : len(counted) + 1]
    return sum(count(reply) for reply in counted) / (counted[-1].ended - begin.ended)


Ask = Callable[[httpx.AsyncClient, Call], Awaitable[R]]


class ClosedLoop(Generic[R]):
    """A load that runs as long as the context: ``at_once`` clients in a thread, each of which sends
    its next call when it has an answer. ``replies`` is complete afterwards.

    ``calls`` makes the call of a number, counted from 0. ``ask`` sends it, as ``ask_one``, and
    raises nothing that a server may cause. An error in the context cancels the calls in flight.
    """

    def __init__(self, url: str, calls: Callable[[int], Call], at_once: int, ask: Ask[R]) -> None:
        self._url = url
        self._ask = ask
        self._numbers = itertools.count()
        self._calls = calls
        self._at_once = at_once
        self._closing = threading.Event()
        self._answered = threading.Event()
        self._thread = contextlib.ExitStack()
        self._ended: Future[None] = Future()
        self.replies: list[R] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def start(self) -> None:
        portal = self._thread.enter_context(start_blocking_portal())
        self._ended = portal.start_task_soon(self._clients)
        self._ended.add_done_callback(lambda _: self._answered.set())

    def settle(self, seconds: float) -> None:
        """Wait for the first answer, when every client has sent a call, then ``seconds``."""
        self._answered.wait()
        if self._ended.done():
            self._ended.result()
        time.sleep(seconds)

    def finish(self) -> None:
        """Send no more calls, and wait for answers. Raises the error that ended the loop early."""
        self._closing.set()
        with self._thread:
            self._ended.result()

    def abandon(self) -> None:
        """Cancel the calls in flight without waiting for their answers."""
        self._closing.set()
        with self._thread:
            self._ended.cancel()

    async def _clients(self) -> None:
        async def client() -> None:
            while not self._closing.is_set():
                self.replies.append(await self._ask(http, self._calls(next(self._numbers))))
                self._answered.set()

        async with _http(self._url) as http, asyncio.TaskGroup() as group:
            for _ in range(self._at_once):
                group.create_task(client())


@dataclass(slots=True)
class Stream:
    """One streamed answer. ``tokens``: how many came with an event, and when.

    Instants are seconds of the monotonic clock. ``error`` says why the answer is missing or
    incomplete; it is None otherwise.
    """

    tokens: list[tuple[float, int]] = field(default_factory=list)
    error: str | None = None

    @property
    def count(self) -> int:
        return sum(count for _, count in self.tokens)

    def gaps(self, began: float, ended: float) -> list[float]:
        """Seconds between tokens, of those from ``began`` to ``ended``; 0 within one event."""
        found = []
        for (before, _), (at, count) in pairwise(self.tokens):
            if began <= at < ended:
                found += [at - before, *[0.0] * (count - 1)]
        return found


async def stream_answer(http: httpx.AsyncClient, call: Call) -> Stream:
    stream, ended, body = Stream(), False, {**call.body, **COUNTED}
    try:
        async with http.stream("POST", call.path, json=body) as response:
            if response.is_error:
                await response.aread()
                stream.error = f"{call.path}: {refusal(response)}"
                return stream
            async for line in response.aiter_lines():
                if line.startswith(DATA):
                    ended = line[len(DATA) :] == END
                    if not ended:
                        _add(stream, json.loads(line[len(DATA) :]))
    except httpx.TransportError as error:
        stream.error = f"{call.path}: {reason_of(error)}"
    if not ended and stream.error is None:
        stream.error = f"{call.path}: the stream ended before its last event"
    return stream


def _add(stream: Stream, event: Mapping[str, Any]) -> None:
    if "error" in event:
        stream.error = str(event["error"])[:LONGEST_TEXT]
        return
    reasons = [choice.get("finish_reason") for choice in event["choices"]]
    if broken := [reason for reason in reasons if reason in FAILURES]:
        stream.error = f"finish_reason {broken[0]}"
    usage = event.get("usage") or {}
    new = usage.get("completion_tokens", stream.count) - stream.count
    if new > 0:
        stream.tokens.append((time.monotonic(), new))


def tokens_between(streams: Sequence[Stream], began: float, ended: float) -> int:
    tokens = chain.from_iterable(stream.tokens for stream in streams)
    return sum(count for at, count in tokens if began <= at < ended)
