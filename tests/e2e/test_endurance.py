"""The short form of ``make chaos`` and ``make soak``: one node, seconds instead of minutes."""

import time
from pathlib import Path

import httpx
import pytest

from endurance import files
from endurance.load import Witness, endless_chat, order
from endurance.servers import Receiver
from endurance.soak import counted
from proofserve.outbox import offline
from proofserve_lab.chats import ClosedLoop, ask_one
from support.node import NAME, ServedNode, until

pytestmark = pytest.mark.engine

HELD = ("proofserve_tasks", "proofserve_leased_blocks", "proofserve_outbox_pending")
CLOSED_S = 6.0


def test_a_receiver_killed_again_and_again_has_every_proof_once(
    node: ServedNode, tmp_path: Path
) -> None:
    outbox = node.server.log.with_name("outbox.sqlite")
    # No test before may have left a round that judged: what that counts is no result.
    node.start_round()
    node.stop()
    with Receiver(tmp_path) as receiver, Witness(node.server.url) as witness:
        receiver.start()
        for number in range(2):
            node.call("POST", "/init/generate", order(number, NAME, receiver.url).body)
            for _ in range(2):
                before = node.processed()
                until(lambda before=before: node.processed() > before + 16)
                receiver.kill("receiver")
                receiver.end_after_kill()
                receiver.start()
            node.stop()
        until(lambda: node.status()["outbox"]["pending"] == 0, seconds=60)
    account = files.compare(outbox, receiver.database, receiver.url)
    seen = witness.compare(files.results(outbox))
    assert account.produced > 64
    assert seen.seen > 64
    assert (seen.lost, seen.overstated) == (0, 0)
    assert (account.missing, account.foreign, account.duplicates, account.damaged) == (0, 0, 0, ())
    # What is delivered can be deleted while the server runs, and its next round works.
    deleted = offline.prune(outbox, time.time())
    assert deleted.results >= account.produced
    after = files.compare(outbox, receiver.database, receiver.url)
    assert (after.produced, after.foreign, after.damaged) == (0, account.produced, ())
    node.start_round()
    until(lambda: node.processed() > 16)
    node.stop()


@pytest.mark.slow  # the outbox tests have it without an engine
def test_a_receiver_that_comes_late_has_every_proof_too(node: ServedNode, tmp_path: Path) -> None:
    with Receiver(tmp_path) as receiver:
        node.call("POST", "/init/generate", order(0, NAME, receiver.url).body)
        until(lambda: node.status()["outbox"]["last_error"] is not None)
        assert node.chat("Chat goes on.")
        # The pauses between tries have doubled to half a minute by the time it listens.
        receiver.start()
        until(lambda: node.status()["outbox"]["delivered"] > 0, seconds=120)
        node.stop()
        until(lambda: node.status()["outbox"]["pending"] == 0, seconds=60)
        produced = node.processed()
        summary = httpx.get(f"{receiver.url}/summary").json()
    assert produced > 0
    assert sum(source["artifacts"] for source in summary["sources"]) == produced


def held(node: ServedNode) -> list[float]:
    """Tasks, leased blocks, callbacks, descriptors and threads of a node."""
    gauges = [counted(f"{node.server.url}/metrics", name) for name in HELD]
    family = node.family()
    return [*gauges, sum(p.num_fds() for p in family), sum(p.num_threads() for p in family)]


def rounds_beside_chat(node: ServedNode, rounds: range) -> None:
    with ClosedLoop(node.server.url, endless_chat(NAME), at_once=4, ask=ask_one) as loop:
        for number in rounds:
            node.start_round(block_hash=f"soak-{number}")
            time.sleep(1.0)
            until(lambda: len(loop.replies) > 4)
            node.stop()
    assert [reply.error for reply in loop.replies if reply.error] == []


def test_rounds_that_come_and_go_beside_chat_leave_nothing_held(node: ServedNode) -> None:
    rounds_beside_chat(node, range(1))
    # By then vLLM has closed its unused connections.
    time.sleep(CLOSED_S)
    before = held(node)
    rounds_beside_chat(node, range(1, 6))
    until(lambda: all(now <= then for now, then in zip(held(node), before, strict=True)))
