"""One server of two engine cores and two API processes: any process answers, every core proves."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from proofserve.wiring.launch import ServerFailed
from proofserve.wiring.owner import address_file
from support.node import NAME, ServedNode, engine_of, serve
from support.node import until as wait_until
from support.processes import have_ended

pytestmark = pytest.mark.engine

TWO_CORES = ("--data-parallel-size", "2")
TWO_PROCESSES = ("--api-server-count", "2")
# A core of the machine for each engine core: vLLM's CPU build would run both on the same.
A_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
PROMPTS = [f"Tell me about the number {number}." for number in range(6)]


@contextmanager
def fresh(node: ServedNode) -> Iterator[ServedNode]:
    """The same server on a new connection, which any API process may accept."""
    again = ServedNode(node.server)
    try:
        yield again
    finally:
        again.close()


def chats(node: ServedNode) -> list[str]:
    """Greedy answers, each over a new connection."""
    answers = []
    for prompt in PROMPTS:
        with fresh(node) as http:
            answers.append(http.chat(prompt, tokens=24))
    return answers


def until(condition: Callable[[], bool]) -> None:
    """Wait longer than elsewhere: five processes share the machine's cores."""
    wait_until(condition, seconds=180)


def status(node: ServedNode) -> Any:
    answer = httpx.get(f"{node.server.url}/api/v1/pow/status", timeout=60)
    assert answer.is_success, answer.text
    return answer.json()


def processed(node: ServedNode) -> int:
    return int(status(node)["stats"]["total_processed"])


def owner_of(folder: Path) -> int | None:
    """The id of the process that owns the node; None between two owners."""
    try:
        found = json.loads(address_file(folder / "outbox.sqlite").read_text())
    except FileNotFoundError:
        return None
    return int(found["process"])


def end_owner(folder: Path, how: signal.Signals) -> int:
    """Send the owner a signal and wait until it has ended; its process id.

    A process that ends resets connections that it had accepted and not yet read. Its parent, of
    vLLM, waits meanwhile: it would look for the exit code once the process has closed its files,
    may find that there is none yet, and would end the whole server.
    """
    owner = owner_of(folder)
    assert owner is not None
    process = psutil.Process(owner)
    parent = process.parent()
    assert parent is not None
    # Without its main thread a process is a zombie, and has no exit code while others end.
    threads = Path(f"/proc/{owner}/task")
    parent.suspend()
    try:
        process.send_signal(how)
        until(
            lambda: process.status() == psutil.STATUS_ZOMBIE and len(list(threads.iterdir())) == 1
        )
    finally:
        parent.resume()
    return owner


def calls_of(node: ServedNode) -> tuple[int, int]:
    """How many calls of /status came from outside, and how many a process passed on to another."""
    log = node.server.log.read_text(errors="replace")
    outside = re.findall(r'127\.0\.0\.1:\d+ - "GET /api/v1/pow/status', log)
    return len(outside), len(re.findall(r'INFO: +- "GET /api/v1/pow/status', log))


def both_processes_answer(node: ServedNode) -> bool:
    """Ask once more: for each connection the kernel chooses a process."""
    status(node)
    outside, passed_on = calls_of(node)
    return 0 < passed_on < outside


def is_whole(rows: Sequence[Any]) -> None:
    """The rows are of one round, and have the first nonces of its lane, each once and in order."""
    assert len({row["round_id"] for row in rows}) == 1
    assert [row["nonce"] for row in rows] == list(range(len(rows)))


def proves_the_same(node: ServedNode, rows: Sequence[Any]) -> None:
    """Proofs made again are bit-equal, whichever core made them then and makes them now."""
    asked = [row["nonce"] for row in rows[:: max(1, len(rows) // 24)]]
    stored = {row["nonce"]: row["vector_b64"] for row in rows}
    again = [node.prove(asked)["artifacts"] for _ in range(2)]
    for artifacts in again:
        assert {each["nonce"]: each["vector_b64"] for each in artifacts} == {
            nonce: stored[nonce] for nonce in asked
        }


def require_the_stopped_core_is_named(node: ServedNode) -> None:
    """Stop the second core while both prove: the owner's watch names it, and it alone."""
    (core,) = [each.pid for each in node.family() if "EngineCore_DP1" in " ".join(each.cmdline())]
    os.kill(core, signal.SIGSTOP)
    try:
        until(lambda: [each["stalled"] for each in status(node)["liveness"]] == [False, True])
        reason = status(node)["liveness"][1]["reason"]
        assert reason.startswith(f"engine core 1 (process {core}) has work and has not stepped")
    finally:
        os.kill(core, signal.SIGCONT)
    until(lambda: not any(each["stalled"] for each in status(node)["liveness"]))


def test_two_cores_and_two_processes_and_the_owner_ends(tiny: Path, tmp_path: Path) -> None:
    settings = {**A_CORE_EACH, "POC_ENGINE_STALL_SEC": "4"}
    with serve(tiny, tmp_path, (*TWO_CORES, *TWO_PROCESSES), **settings) as node:
        alone = chats(node)
        with fresh(node) as http:
            http.start_round()
        until(lambda: all(core["proved"] >= 32 for core in status(node)["cores"]))
        assert [core["stopped"] for core in status(node)["cores"]] == [False, False]
        assert len(engine_of(lambda: status(node))["cores"]) == 2
        until(lambda: both_processes_answer(node))
        assert chats(node) == alone
        round_id, reported = status(node)["round_id"], processed(node)
        assert reported > 0

        owner = end_owner(tmp_path, signal.SIGTERM)
        until(lambda: owner_of(tmp_path) not in (None, owner))
        after = status(node)
        assert (after["status"], after["round_id"]) == ("GENERATING", round_id)
        assert processed(node) >= reported
        until(lambda: processed(node) > reported + 64)
        assert chats(node) == alone
        require_the_stopped_core_is_named(node)

        with fresh(node) as last:
            last.stop()
            rows = last.results()
            is_whole(rows)
            assert len(rows) > reported + 64
            proves_the_same(last, rows)
        # The leases of both owners are back.
        until(lambda: engine_of(lambda: status(node))["leased_blocks"] == 0)
        scrape = httpx.get(f"{node.server.url}/api/v1/pow/metrics", timeout=60)
        assert 'proofserve_core_busy_seconds_total{core="1"}' in scrape.text
        node.server.process.terminate()
        assert node.server.process.wait(60) == 0


@pytest.mark.slow
def test_after_a_killed_owner_the_server_ends_and_its_restart_loses_nothing(
    tiny: Path, tmp_path: Path
) -> None:
    """vLLM ends a server of which an API process was killed (docs/operations.md)."""
    options = (*TWO_CORES, *TWO_PROCESSES)
    with serve(tiny, tmp_path, options, **A_CORE_EACH) as node:
        alone = chats(node)
        with fresh(node) as http:
            http.start_round()
        until(lambda: processed(node) >= 64)
        round_id, reported = status(node)["round_id"], processed(node)
        family = node.family()
        end_owner(tmp_path, signal.SIGKILL)
        until(lambda: have_ended(family))
    with serve(tiny, tmp_path, options, **A_CORE_EACH, POC_RESUME="1") as node:
        after = status(node)
        assert (after["status"], after["round_id"]) == ("GENERATING", round_id)
        assert processed(node) >= reported
        until(lambda: processed(node) > reported + 64)
        assert chats(node) == alone
        with fresh(node) as last:
            last.stop()
            rows = last.results()
            is_whole(rows)
            assert len(rows) > reported
            proves_the_same(last, rows)


@pytest.mark.slow
def test_receipts_with_several_processes_are_refused_with_the_reason(
    tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(ServerFailed), serve(tiny, tmp_path, TWO_PROCESSES, POC_RECEIPTS="1"):
        pytest.fail("the server should not have started")
    assert "--api-server-count 1 or without --receipts" in (tmp_path / "server.log").read_text()


@pytest.mark.slow
def test_every_core_gives_receipts_of_its_answers(tiny: Path, tmp_path: Path) -> None:
    with serve(tiny, tmp_path, TWO_CORES, **A_CORE_EACH, POC_RECEIPTS="1") as node:
        alone = chats(node)
        node.start_round()
        assert chats(node) == alone
        ids = [asked(node, prompt) for prompt in PROMPTS]
        for response_id in ids:
            assert len(receipts_of(node, response_id)) == 1
        busy = [core["busy_s"] for core in node.status()["engine"]["cores"]]
        assert min(busy) > 0
        receipts = node.status()["receipts"]
        assert receipts["without"] == {}
        node.stop()


def receipts_of(node: ServedNode, response_id: str) -> list[Any]:
    """Those of a response, once they are in the log."""
    url = f"{node.server.url}/api/v1/receipts/{response_id}"
    until(lambda: httpx.get(url, timeout=60).status_code != httpx.codes.TOO_EARLY)
    answer = httpx.get(url, timeout=60)
    assert answer.is_success, answer.text
    found: list[Any] = answer.json()["receipts"]
    return found


def asked(node: ServedNode, prompt: str) -> str:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{node.server.url}/v1/completions", json=body, timeout=60)
    assert answer.is_success, answer.text
    return str(answer.json()["id"])
