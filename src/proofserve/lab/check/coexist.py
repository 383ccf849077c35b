"""Do chat and proofs share one engine, chat first? The four cases of the requirement."""

import time
from collections.abc import Callable, Sequence

from proofserve.lab.check.checks import Check, Tell
from proofserve.lab.client.chats import chats, reading_chat
from proofserve.lab.client.errors import TooSlowError
from proofserve.lab.client.load import Call, ClosedLoop, Reply, ask_all, closed_loop
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.records import Work
from proofserve.lab.client.waiting import computing_round, wait_until

CHATS = 5
# Much to read: the API process must not be what the engine waits for, or it idles for a moment,
# and a proof that uses the moment breaks no promise.
CLIENTS = 16
WORDS = 400
# Until the clients of a load are all in a running batch.
SETTLE_S = 1.5
LOAD_S = 3.0
FULL_SPEED_S = 4.0
# The rest is the loop around the forwards, and one forward at either end of the window.
FULL_SPEED = 0.8
LONGEST_WAIT_BATCHES = 1.05
RESUME_S = 30.0


def coexist(node: NodeClient, work: Work, tell: Tell) -> None:
    """Tell each case as it is seen; a node that refuses a call is a NodeError."""
    with computing_round(node, work):
        _chat_during_round(node, work, tell)
        tell(_full_speed_when_idle(node))
    _round_during_chat(node, work, tell)
    with computing_round(node, work):
        _chat_has_priority(node, work, tell)


def _chat_during_round(node: NodeClient, work: Work, tell: Tell) -> None:
    replies = ask_all(node.url, chats(work.model, range(CHATS), 16, "coexist"), 1)
    slowest = max(reply.seconds for reply in replies) * 1e3
    tell(_completed("chat completes during a round", replies, f"slowest {slowest:.0f} ms"))
    tell(_resumes(node, "proofs resume after chat"))


def _full_speed_when_idle(node: NodeClient) -> Check:
    before, began = node.engine(), time.monotonic()
    time.sleep(FULL_SPEED_S)
    after, ended = node.engine(), time.monotonic()
    share = (after.busy_s - before.busy_s) / (ended - began)
    detail = f"{share:.0%} of the time in forwards, {after.forwards - before.forwards} of them"
    return Check("proofs run at full speed while chat is idle", share >= FULL_SPEED, detail)


def _round_during_chat(node: NodeClient, work: Work, tell: Tell) -> None:
    loop = ClosedLoop(node.url, _endless_chat(work), CLIENTS)
    loop.start()
    try:
        loop.settle(SETTLE_S)
        with node.round(work):
            state = node.status().state
            tell(Check("a round starts while chat is active", state == "GENERATING", state))
            time.sleep(LOAD_S)
            proofs = node.status().processed
            detail = f"{proofs} proofs in {LOAD_S:g} s"
            tell(Check("and yields until chat drains", proofs == 0, detail))
            loop.finish()
            tell(_completed("that chat completes", loop.replies, f"{CLIENTS} at a time"))
            tell(_resumes(node, "proofs begin once chat has drained"))
    finally:
        loop.abandon()


def _chat_has_priority(node: NodeClient, work: Work, tell: Tell) -> None:
    with closed_loop(node.url, _endless_chat(work), CLIENTS) as loop:
        loop.settle(SETTLE_S)
        before = node.status().processed
        time.sleep(LOAD_S)
        proofs = node.status().processed - before
    detail = f"{proofs} proofs in {LOAD_S:g} s of endless chat"
    tell(Check("proofs pause while chat is active", proofs == 0, detail))
    tell(_completed("that chat completes as well", loop.replies, f"{CLIENTS} at a time"))
    wait = node.engine().longest_chat_wait_batches
    detail = f"longest wait so far: {wait:.2f} forwards"
    tell(Check("no chat waits for more than one forward", wait <= LONGEST_WAIT_BATCHES, detail))
    tell(_resumes(node, "proofs resume after that, too"))


def _endless_chat(work: Work) -> Callable[[int], Call]:
    return lambda number: reading_chat(work.model, number, WORDS)


def _completed(name: str, replies: Sequence[Reply], detail: str) -> Check:
    errors = [reply.error for reply in replies if reply.error]
    if errors:
        return Check(name, False, f"{len(errors)} of {len(replies)} failed: {errors[0]}")
    complete = all(reply.completion_tokens > 0 for reply in replies)
    return Check(name, complete and bool(replies), f"{len(replies)} chats, {detail}")


def _resumes(node: NodeClient, name: str) -> Check:
    before = node.status().processed
    try:
        seconds = wait_until(lambda: node.status().processed > before, "new proofs", RESUME_S)
    except TooSlowError as error:
        return Check(name, False, str(error))
    return Check(name, True, f"new results after {seconds:.1f} s")
