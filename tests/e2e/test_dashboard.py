"""The page in vLLM's own server: its routes, its stream, and the engine's steps in it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.node import ServedNode, until

pytestmark = pytest.mark.engine


def events(response: httpx.Response) -> Iterator[Any]:
    """The snapshots of a stream."""
    name = ""
    for line in response.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data" and name == "snapshot":
            yield json.loads(value)


def test_a_round_of_a_real_engine_is_seen_live(node: ServedNode) -> None:
    url = f"{node.server.url}/dashboard"
    assert "default-src 'none'" in httpx.get(url).headers["content-security-policy"]
    with httpx.stream("GET", f"{url}/events", timeout=60.0) as response:
        assert response.status_code == 200
        stream = events(response)
        (member,) = next(stream)["members"]
        assert member["state"] == "idle"
        assert member["stalled_s"] < 4.0
        node.start_round()
        until(lambda: node.processed() > 0)
        # On a slow processor the smallest part of a forward is longer than chat should wait.
        proving = {"proving", "chat waits"}
        seen = next(each for each in stream if each["members"][0]["state"] in proving)
        assert seen["round"]["state"] == "generating"
        assert {offer["id"] for offer in seen["actions"]} == {"stop"}
        node.stop()
        seen = next(each for each in stream if each["members"][0]["state"] == "idle")
        assert [event["text"] for event in seen["round"]["events"]] == ["generating", "stopped"]
