"""Checks that chat and proofs share one engine, and that chat goes first, in four cases."""

import time
from collections.abc import Callable, Sequence

from proofserve.lab.check.checks import Check, Reporter
from proofserve.lab.client.chats import chats, reading_chat
from proofserve.lab.client.errors import TooSlowError
from proofserve.lab.client.load import Call, ClosedLoop, Reply, ask_all, closed_loop
from proofserve.lab.client.node_client import NodeClient, computing_round, wait_until
from proofserve.lab.client.records import Work

CHATS = 5
# Long prompts and short answers: the engine must not wait for the API process. If it did, it would
# be idle for a moment, and a proof may rightly use that moment.
CLIENTS = 16
WORDS = 400
# By then every client has a request in a running batch.
SETTLE_S = 1.5
LOAD_S = 3.0
WINDOWS = 3
# With more idle time than this, chat did not saturate the engine: the API process was too slow.
MOST_IDLE = 0.2
FULL_SPEED_S = 4.0
# The rest is the work between forwards, and one forward cut off at each end of the window.
FULL_SPEED = 0.8
LONGEST_WAIT_BATCHES = 1.05
RESUME_S = 30.0


def coexist(node: NodeClient, work: Work, report: Reporter) -> None:
    """Report the checks of each case. Raises NodeError if the node refuses a call."""
    with computing_round(node, work):
        _chat_during_round(node, work, report)
        report(_full_speed_when_idle(node))
    _round_during_chat(node, work, report)
    with computing_round(node, work):
        _chat_has_priority(node, work, report)


def _chat_during_round(node: NodeClient, work: Work, report: Reporter) -> None:
    replies = ask_all(node.url, chats(work.model, range(CHATS), 16, "coexist"), 1)
    slowest = max(reply.seconds for reply in replies) * 1e3
    report(_completed("chat completes during a round", replies, f"slowest {slowest:.0f} ms"))
    report(_resumes(node, "proofs resume after chat"))


def _full_speed_when_idle(node: NodeClient) -> Check:
    before, began = node.engine(), time.monotonic()
    time.sleep(FULL_SPEED_S)
    after, ended = node.engine(), time.monotonic()
    share = (after.busy_s - before.busy_s) / (ended - began)
    detail = f"{share:.0%} of the time in forwards, {after.forwards - before.forwards} of them"
    return Check("proofs run at full speed while chat is idle", share >= FULL_SPEED, detail)


def _round_during_chat(node: NodeClient, work: Work, report: Reporter) -> None:
    loop = ClosedLoop(node.url, _endless_chat(work), CLIENTS)
    loop.start()
    try:
        loop.settle(SETTLE_S)
        with node.round(work):
            state = node.status().state
            report(Check("a round starts while chat is active", state == "GENERATING", state))
            report(_no_proofs(node, "the round waits until that chat has ended"))
            loop.finish()
            name = "chat completes although a round has started"
            report(_completed(name, loop.replies, f"{CLIENTS} at a time"))
            report(_resumes(node, "proofs start when chat has ended"))
    finally:
        loop.abandon()


def _chat_has_priority(node: NodeClient, work: Work, report: Reporter) -> None:
    with closed_loop(node.url, _endless_chat(work), CLIENTS) as loop:
        loop.settle(SETTLE_S)
        report(_no_proofs(node, "a running round pauses while chat is active"))
    report(_completed("chat completes beside a paused round", loop.replies, f"{CLIENTS} at a time"))
    wait = node.engine().longest_chat_wait_batches
    name = "no chat request waits for more than one forward"
    report(Check(name, wait <= LONGEST_WAIT_BATCHES, f"longest wait so far: {wait:.2f} forwards"))
    report(_resumes(node, "a paused round resumes after chat"))


def _no_proofs(node: NodeClient, name: str) -> Check:
    """Passes with the first window without proofs: a stall of the machine can let one proof in."""
    for _ in range(WINDOWS):
        before, began = node.status(), time.monotonic()
        time.sleep(LOAD_S)
        after, seconds = node.status(), time.monotonic() - began
        proofs = after.processed - before.processed
        idle = after.idle_s(before, seconds) / seconds
        if proofs == 0:
            break
    detail = f"{proofs} proofs in {seconds:.1f} s of chat; the engine was idle for {idle:.0%}"
    if proofs > 0 and idle > MOST_IDLE:
        return Check(name, None, f"skipped: {detail}, and proofs may use that")
    return Check(name, proofs == 0, detail)


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
