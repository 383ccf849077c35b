"""Chats whose answers are streamed: when each token came."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import httpx

from proofserve.lab.client.load import FAILURES, LONGEST_TEXT, Call

DATA = "data: "
END = "[DONE]"
# vLLM joins tokens in one event when the reader is slow, so each event must say how many came.
COUNTED = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


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
        """Seconds between a token and the one before it, of tokens from ``began`` to ``ended``.

        Tokens that come in one event have gaps of 0 between them.
        """
        found = []
        for (before, _), (at, count) in pairwise(self.tokens):
            if began <= at < ended:
                found += [at - before, *[0.0] * (count - 1)]
        return found


async def stream_answer(http: httpx.AsyncClient, call: Call) -> Stream:
    """Send ``call`` and read its answer as it comes."""
    stream, ended, body = Stream(), False, {**call.body, **COUNTED}
    try:
        async with http.stream("POST", call.path, json=body) as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                stream.error = f"{call.path}: {response.status_code} {text[:LONGEST_TEXT]}"
                return stream
            async for line in response.aiter_lines():
                if line.startswith(DATA):
                    ended = line[len(DATA) :] == END
                    if not ended:
                        _add(stream, json.loads(line[len(DATA) :]))
    except httpx.TransportError as error:
        stream.error = f"{call.path}: {str(error) or type(error).__name__}"
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
    """Tokens of all ``streams`` that came from ``began`` to ``ended``."""
    tokens = chain.from_iterable(stream.tokens for stream in streams)
    return sum(count for at, count in tokens if began <= at < ended)
