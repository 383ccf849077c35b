"""How streams of chat end when their server ends."""

import json
from collections.abc import Iterator
from typing import Any

from support.pace import PACE

# The documented bound without due callbacks: the engine's end, then 10 s.
BOUND_S = 20.0 * PACE


def payloads(events: Iterator[str]) -> list[Any]:
    """The remaining events of a stream, which must end in order."""
    *rest, last = [event.removeprefix("data: ") for event in events]
    assert last == "[DONE]"
    return [json.loads(event) for event in rest]


def ends_with_an_error(events: Iterator[str]) -> None:
    last = payloads(events)[-1]
    assert "error" in last, last
    error = last["error"]
    assert (error["code"], error["message"]) == (503, "The server is shutting down.")
