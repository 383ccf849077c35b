"""Do chat and proofs share one engine, chat first? The four cases of the requirement."""

import time
from collections.abc import Iterator

from proofserve.lab.chats import chats, uneven_chat
from proofserve.lab.checks import Check
from proofserve.lab.errors import NodeError
from proofserve.lab.load import Call, Reply, ask_all, closed_loop
from proofserve.lab.node_client import NodeClient
from proofserve.lab.records import Work
from proofserve.lab.waiting import computing_round, wait_until
from proofserve.rounds.records import EngineGauges

CHATS = 5
CLIENTS = 8
TOKENS = 48
# Until the clients of a load are all in a running batch.
SETTLE_S = 1.5
LOAD_S = 3.0
FULL_SPEED_S = 4.0
# The rest is the loop around the forwards, and one forward at either end of the window.
FULL_SPEED = 0.8
LONGEST_WAIT_BATCHES = 1.05
RESUME_S = 30.0


def coexist(node: NodeClient, work: Work) -> Iterator[Check]:
    """Each case as it is seen; a node that refuses a call is a NodeError."""
    with computing_round(node, work):
        yield from _chat_during_round(node, work)
        yield _full_speed_when_idle(node)
    yield from _round_during_chat(node, work)
    with computing_round(node, work):
        yield from _chat_has_priority(node, work)


def _chat_during_round(node: NodeClient, work: Work) -> Iterator[Check]:
    replies = ask_all(node.url, chats(work.model, range(CHATS), 16, "coexist"), 1)
    slowest = max(reply.seconds for reply in replies) * 1e3
    yield _completed("chat completes during a round", replies, f"slowest {slowest:.0f} ms")
    yield _resumes(node, "proofs resume after chat")


def _full_speed_when_idle(node: NodeClient) -> Check:
    before, began = _engine(node), time.monotonic()
    time.sleep(FULL_SPEED_S)
    after, ended = _engine(node), time.monotonic()
    share = (after.busy_s - before.busy_s) / (ended - began)
    detail = f"{share:.0%} of the time in forwards, {after.forwards - before.forwards} of them"
    return Check("proofs run at full speed while chat is idle", share >= FULL_SPEED, detail)


def _round_during_chat(node: NodeClient, work: Work) -> Iterator[Check]:
    with _load(node, work) as loop:
        time.sleep(SETTLE_S)
        state = node.start_round(work)
        try:
            yield Check("a round starts while chat is active", state == "GENERATING", state)
            time.sleep(LOAD_S)
            during = node.status().processed
        except BaseException:
            node.stop()
            raise
    try:
        yield _completed("that chat completes", loop.replies, f"{CLIENTS} at a time")
        yield Check("the round yields until chat drains", during == 0, f"{during} proofs meanwhile")
        yield _resumes(node, "and then gets on")
    finally:
        node.stop()
