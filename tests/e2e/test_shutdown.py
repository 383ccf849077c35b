"""SIGTERM while clients stream chat: the streams end with the engine, and the node with them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.node import ServedNode, serve

pytestmark = pytest.mark.engine

# The documented bound without a round and without due callbacks: the engine's end, then 10 s.
BOUND_S = 20.0


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


def test_streams_of_an_ended_engine_end_with_an_error(tiny: Path, tmp_path: Path) -> None:
    # The engine works on many sequences of the chat at once, so that it lasts for seconds.
    with serve(tiny, tmp_path) as node, node.streamed_chat(n=32) as events:
        node.start_round()
        node.server.process.terminate()
        ends_with_an_error(events)
        assert node.server.process.wait(BOUND_S) == 0
        assert "Error in chat completion stream" not in node.server.log.read_text()


def test_with_a_shutdown_timeout_short_chats_finish_and_long_ones_end_with_an_error(
    tiny: Path, tmp_path: Path
) -> None:
    with serve(tiny, tmp_path, ("--shutdown-timeout", "2")) as node:
        short_and_long(node)
        assert node.server.process.wait(BOUND_S) == 0


def short_and_long(node: ServedNode) -> None:
    with node.streamed_chat(n=32) as long, node.streamed_chat(max_tokens=20) as short:
        node.server.process.terminate()
        assert payloads(short)[-1]["choices"][0]["finish_reason"] == "length"
        ends_with_an_error(long)
