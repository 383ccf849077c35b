"""One round and three ends of its server: in order, its API process killed, its worker killed.

At the end in order a client streams chat: its stream ends with an error, and the server in time.
"""

import asyncio
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from proofserve.outbox.store import SqliteOutbox
from support.node import SECOND_PROCESS, ServedNode, serve, until
from support.processes import have_ended
from support.streams import BOUND_S, ends_with_an_error

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("new_processes")]

API_PROCESS, WORKER = 0, -1
KEY = "key-of-this-test"
JUDGED = 32


def killed_during_the_round(node: ServedNode, victim: int) -> int:
    """Results that were seen when one process of the server's family was killed."""
    # Every nonce of this round wins. Those judged count as processed, too, and are no results.
    reported = len(node.results())
    until(lambda: len(node.results()) > reported + 16)
    reported = len(node.results())
    family = node.family()
    family[victim].send_signal(signal.SIGKILL)
    # The other processes end too: none is left that holds memory or the port.
    until(lambda: have_ended(family), seconds=60)
    return reported


def goes_on(node: ServedNode, reported: int) -> None:
    """The round is configured as before, has all reported results, and finds more."""
    status = node.status()
    assert status["state"] == "GENERATING"
    assert status["config"]["scheme"]["layer_hooks"] is True
    assert node.processed() >= reported
    until(lambda: node.processed() > reported + 16)


def is_whole_and_honest(node: ServedNode, rows: list[Any]) -> None:
    """No nonce of the round is missing or twice, and this server finds the same distances.

    It computes again the first ones and the last ones, which different servers have proved.
    """
    assert len({row["round_id"] for row in rows}) == 1
    assert [row["nonce"] for row in rows] == list(range(len(rows)))
    chosen = [*rows[:JUDGED], *rows[-JUDGED:]]
    answer = node.judge(chosen)
    pairs = zip(answer["computed_distances"], chosen, strict=True)
    assert max(abs(ours - row["dist"]) for ours, row in pairs) <= 1e-4
    assert not answer["fraud_detected"]


def asks_for_its_key(node: ServedNode) -> None:
    """A server with a key says so in its log, answers 401 without it, and never shows it."""
    for headers in ({}, {"Authorization": f"Bearer {KEY}x"}):
        refused = httpx.get(f"{node.server.url}/api/v1/pow/status", headers=headers)
        assert refused.status_code == 401
    log = node.server.log.read_text()
    assert "keys of operator-1 (operator)" in log
    assert KEY not in log
    # Chat is vLLM's own: it has another key, or none.
    assert node.chat("Hello")


async def stored_in(path: Path) -> list[int]:
    """The nonces in the outbox of a stopped server, in the order in which they were stored."""
    async with await SqliteOutbox.open(path) as outbox:
        return [row.nonce for row in await outbox.results(0, 1_000_000)]


def test_a_round_goes_on_after_every_end_of_its_server_and_loses_no_reported_result(
    tiny: Path, tmp_path: Path
) -> None:
    with serve(tiny, tmp_path) as node:
        free = node.free_blocks()
        node.start_distance_round(use_layer_hooks=True)
        until(lambda: node.processed() >= 48)
        reported = node.processed()
        log = node.server.log
        # The engine works on many sequences of the chat at once, so that it lasts for seconds.
        with node.streamed_chat(n=32) as events:
            node.server.process.terminate()
            ends_with_an_error(events)
        assert node.server.process.wait(BOUND_S) == 0
    assert "Error in chat completion stream" not in log.read_text()
    # After SIGTERM the server ends the round before the engine; no client had stopped the round.
    assert re.search(r"round [\w-]+ ended after \d+ nonces: stopped", log.read_text())
    with serve(tiny, tmp_path, POC_RESUME="1", POC_API_KEY=KEY) as node:
        asks_for_its_key(node)
        goes_on(node, reported)
        node.call("POST", "/phase/validate")
        is_whole_and_honest(node, node.results())
        node.call("POST", "/phase/generate")
        reported = killed_during_the_round(node, API_PROCESS)
    with serve(tiny, tmp_path, executor=SECOND_PROCESS, POC_RESUME="1") as node:
        goes_on(node, reported)
        assert node.chat("Still there?")
        node.stop()
        assert node.status()["total_checked"] == len(node.results())
        is_whole_and_honest(node, node.results())
        until(lambda: node.free_blocks() == free)
        node.call("POST", "/phase/generate")
        reported = killed_during_the_round(node, WORKER)
    nonces = asyncio.run(stored_in(tmp_path / "outbox.sqlite"))
    assert len(nonces) >= reported
    assert nonces == list(range(len(nonces)))
