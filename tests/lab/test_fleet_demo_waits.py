"""What the demo of a fleet makes of verdicts that are wrong, and of processes that end."""

import io
import re
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from proofserve.cli.session import CommandSession, Interrupts, ProgressLine
from proofserve.remote.node_client import NodeClient
from proofserve.reports import ReportedError
from proofserve_lab.fleet_demo import CHEAT, EXPECTED, DemoFleet, DemoProcesses


def shown(tmp_path: Path, cheat: str, state: str) -> tuple[bool, str]:
    """Whether all is as it should be, and what is printed, when the cheat has this verdict."""
    members = [
        {"name": name, "state": state if name == CHEAT else "ready", "stored": 99, "lane": 1}
        | {"verdict": {"outcome": outcome, "nonces": 3, "reason": f"why it is {outcome}"}}
        | {"wish_reason": "unproved in 1 of its newest 20 jobs"}
        for name, outcome in (EXPECTED | {CHEAT: cheat}).items()
    ]
    snapshot = {"members": members, "verification": {"jobs": {"queued": 0}}}
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, json=snapshot))
    console = Console(file=io.StringIO(), record=True, width=200)
    with Interrupts() as interrupts, ProgressLine(console) as line:
        session = CommandSession(console, interrupts, line)
        processes = DemoProcesses(tmp_path, session, "float32")
        with (
            NodeClient("http://fleet") as node,
            httpx.Client(transport=transport, base_url="http://fleet") as http,
        ):
            right = DemoFleet(processes, session, node, http, {})._verdicts()
    return right, console.export_text()


def test_a_cheat_that_is_found_is_waited_for_until_it_is_cordoned(tmp_path: Path) -> None:
    right, text = shown(tmp_path, "unproved", "cordoned")
    assert right
    assert "should not be" not in text
    assert "server 4: unproved in 1 of its newest 20 jobs" in text


@pytest.mark.parametrize("outcome", ["honest", "undecided", "abstained"])
def test_a_cheat_that_is_not_found_is_shown_at_once(tmp_path: Path, outcome: str) -> None:
    right, text = shown(tmp_path, outcome, "ready")
    assert not right
    assert re.search(rf"{outcome}  \(should not be\) +3  why it is {outcome}", text), text
    assert "Cordoned" not in text


def test_a_worker_that_ends_is_named_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_MODEL", str(tmp_path / "nothing"))
    with Interrupts() as interrupts, ProgressLine(Console(quiet=True)) as line:
        session = CommandSession(Console(quiet=True), interrupts, line)
        with closing(DemoProcesses(tmp_path, session, "float32")) as processes:
            # It finds no checkpoint there.
            processes.worker()
            with pytest.raises(ReportedError, match=r"(?s)the worker has ended with 2:.*--model"):
                until_it_ends(processes)


def until_it_ends(processes: DemoProcesses) -> None:
    while True:
        processes.require_alive()
        time.sleep(0.05)
