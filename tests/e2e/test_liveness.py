"""A real engine core that is stopped by SIGSTOP is reported, and one that idles or works is not.

The served node reports a hang after a few seconds (``STALL_S``) instead of a minute.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from support.node import NAME, ServedNode, until
from support.pace import PACE

pytestmark = pytest.mark.engine

# As in ``conftest``.
STALL_S = 4.0
# A hang is reported so much later: usually, and at most on a machine that others use as well.
SLACK_S = 2.0
LATEST_S = 12.0 * PACE
TRIES = 10


def engine_core(node: ServedNode) -> int:
    """The id of the engine core's process."""
    (core,) = [each.pid for each in node.family() if "EngineCore" in " ".join(each.cmdline())]
    return core


@contextmanager
def stopped(process: int) -> Iterator[float]:
    """Stop ``process`` until the context ends; yields when, in seconds of the monotonic clock."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        os.kill(process, signal.SIGCONT)


@contextmanager
def stopped_in(node: ServedNode, process: int, doing: str) -> Iterator[float]:
    """As ``stopped``, and again after a moment if that was between two steps."""
    for number in range(TRIES):
        # Otherwise it would not have moved since the last try.
        time.sleep(0.05 * number)
        with stopped(process) as since:
            # The node looks twice a second.
            time.sleep(1)
            if liveness(node)["doing"] == doing:
                yield since
                return
    raise AssertionError(f"{TRIES} times the core was between two steps")


def liveness(node: ServedNode) -> Any:
    (core,) = node.status()["liveness"]
    return core


def metric(node: ServedNode, name: str) -> float:
    text = node.request("GET", "/metrics").text
    (value,) = [line.split()[1] for line in text.splitlines() if line.startswith(f"{name}{{")]
    return float(value)


def require_report(node: ServedNode, core: int, since: float, where: str) -> None:
    """Wait until every way of asking says that ``core`` hangs since ``since``."""
    until(lambda: node.request("GET", "/health/ready").status_code == 503)
    assert time.monotonic() - since < STALL_S + LATEST_S
    engine = node.request("GET", "/health/ready").json()["detail"]["engine"]
    assert engine.startswith(f"engine core 0 (process {core}) has work and has not stepped for")
    assert "stopped process (SIGSTOP" in engine
    assert engine.endswith(where)
    assert int(engine.partition("stepped for ")[2].partition(" s")[0]) >= int(STALL_S)
    # vLLM's own check stays green.
    assert httpx.get(f"{node.server.url}/health", timeout=10).status_code == 200
    assert liveness(node)["stalled"] is True
    assert metric(node, "proofserve_core_stalled") == 1
    assert metric(node, "proofserve_core_step_age_seconds") >= STALL_S


def require_recovery(node: ServedNode) -> None:
    until(lambda: node.request("GET", "/health/ready").status_code == 200)
    assert liveness(node)["reason"] is None
    assert metric(node, "proofserve_core_stalled") == 0


def until_idle(node: ServedNode) -> None:
    """Wait for the forwards that the test before left in the engine."""

    def is_idle() -> bool:
        steps = liveness(node)["steps"]
        # The node looks twice a second.
        time.sleep(1)
        return liveness(node)["doing"] == "nothing" and liveness(node)["steps"] == steps

    until(is_idle)


def test_a_core_that_is_stopped_in_mid_chat(node: ServedNode) -> None:
    core, steps = engine_core(node), liveness(node)["steps"]
    # A machine that other tests keep busy may have stood still for 4 seconds before.
    earlier = len(node.server.log.read_text())
    with node.streamed_chat() as events:
        with stopped_in(node, core, "chat") as since:
            require_report(node, core, since, "in a step of chat")
        # Whatever followed is in the stream: nothing was lost.
        tail = list(events)
    assert tail[-1] == "data: [DONE]"
    assert json.loads(tail[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    require_recovery(node)
    # What the node shows may be half a second old.
    until(lambda: liveness(node)["steps"] > steps + 250)
    log = node.server.log.read_text()[earlier:]
    # On a busy machine it may hang, and go on, again; each is told once.
    hangs = log.count("has work and has not stepped")
    assert hangs == log.count("engine core 0 goes on") >= 1
    assert log.count("restart the server if it does not go on") == hangs


def test_a_core_that_is_stopped_in_mid_proof(node: ServedNode) -> None:
    core = engine_core(node)
    node.start_round()
    until(lambda: node.processed() >= 32)
    with stopped_in(node, core, "proof") as since:
        require_report(node, core, since, "in a proof forward")
    require_recovery(node)
    done = node.processed()
    until(lambda: node.processed() > done + 32)


def test_a_core_that_is_stopped_while_idle_is_reported_once_it_is_asked(node: ServedNode) -> None:
    core = engine_core(node)
    until_idle(node)
    with stopped(core), ThreadPoolExecutor(1) as one:
        time.sleep(STALL_S + SLACK_S)
        assert metric(node, "proofserve_core_stalled") == 0
        since = time.monotonic()
        answer = one.submit(node.chat, "Are you there?")
        require_report(node, core, since, "between two steps")
        os.kill(core, signal.SIGCONT)
        assert answer.result(60)
    require_recovery(node)


def test_an_idle_core_is_not_reported(node: ServedNode) -> None:
    until_idle(node)
    end = time.monotonic() + STALL_S + SLACK_S
    while time.monotonic() < end:
        assert node.call("GET", "/health/ready") == {"status": "ok"}
        assert (liveness(node)["waited_s"], liveness(node)["doing"]) == (0, "nothing")
        time.sleep(0.2)


def test_long_prefills_are_not_reported(node: ServedNode) -> None:
    """Prompts for longer than the limit, each in parts, and no token in between."""
    body = {"model": NAME, "prompt": [[7 + i] * 2000 for i in range(4)], "max_tokens": 1}
    deadline = time.monotonic() + STALL_S + SLACK_S

    def prefill() -> None:
        with httpx.Client(base_url=node.server.url, timeout=120) as client:
            while time.monotonic() < deadline:
                assert client.post("/v1/completions", json=body).is_success

    with ThreadPoolExecutor(2) as two:
        working = [two.submit(prefill) for _ in range(2)]
        while not all(each.done() for each in working):
            assert node.call("GET", "/health/ready") == {"status": "ok"}
            time.sleep(0.2)
        for each in working:
            each.result()
