"""Checks that chat and proofs share one engine, and that chat goes first, in four cases."""

import time
from collections.abc import Callable, Sequence

from proofserve.lab.chats import (
    Call,
    ClosedLoop,
    Reply,
    ask_all,
    ask_one,
    chats,
    closed_loop,
    reading_chat,
)
from proofserve.lab.check.smoke import Check, Reporter
from proofserve.lab.node_client import NodeClient, computing_round, wait_until
from proofserve.lab.records import Work
from proofserve.lab.report import TooSlowError

CHATS = 5
# Long prompts and short answers: the engine must not wait for the API process. If it did, it would
# be idle for a moment, and a proof may rightly use that moment.
CLIENTS = 16
WORDS = 400
# By then every client has a request in a running batch.
SETTLE_S = 1.5
LOAD_S = 2.0
# So many windows without a forward are enough; more than MOST_WINDOWS are not tried. For full speed
# so many windows are tried, and one is enough.
WINDOWS = 3
MOST_WINDOWS = 8
GRACE_MS = 6.0  # ADR 9: a forward may start when chat has not used the engine for so long
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
    """The best of some windows: in one of them the machine may have stood still."""
    share, forwards = 0.0, 0
    for _ in range(WINDOWS):
        before, began = node.engine(), time.monotonic()
        time.sleep(FULL_SPEED_S)
        after, ended = node.engine(), time.monotonic()
        found = (after.busy_s - before.busy_s) / (ended - began)
        share, forwards = max((share, forwards), (found, after.forwards - before.forwards))
        if share >= FULL_SPEED:
            break
    detail = f"{share:.0%} of the time in forwards, {forwards} of them"
    return Check("proofs run at full speed while chat is idle", share >= FULL_SPEED, detail)


def _round_during_chat(node: NodeClient, work: Work, report: Reporter) -> None:
    loop = ClosedLoop(node.url, _endless_chat(work), CLIENTS, ask_one)
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
    with closed_loop(node.url, _endless_chat(work), CLIENTS, ask_one) as loop:
        loop.settle(SETTLE_S)
        report(_no_proofs(node, "a running round pauses while chat is active"))
    report(_completed("chat completes beside a paused round", loop.replies, f"{CLIENTS} at a time"))
    wait = node.engine().longest_chat_wait_batches
    name = "no chat request waits for more than one forward"
    report(Check(name, wait <= LONGEST_WAIT_BATCHES, f"longest wait so far: {wait:.2f} forwards"))
    report(_resumes(node, "a paused round resumes after chat"))


def _no_proofs(node: NodeClient, name: str) -> Check:
    """Fails if chat paused for less than the grace before a forward, by the engine's clock.

    Proofs may use a longer pause, in which the machine stood still; its window is measured again.
    """
    clean, left_out = 0, list[float]()
    while clean < WINDOWS and clean + len(left_out) < MOST_WINDOWS:
        before = node.engine().forwards
        time.sleep(LOAD_S)
        after = node.engine()
        if (forwards := after.forwards - before) == 0:
            clean += 1
            continue
        # Some of these may be older, since several forwards can use one pause.
        pause = min(after.resume_ms[-forwards:], default=0.0)
        if pause < GRACE_MS:
            detail = f"forwards in {LOAD_S:g} s: {forwards}, after a chat pause of {pause:.1f} ms"
            return Check(name, False, detail)
        left_out.append(pause)
    detail = f"no forward in {clean} windows of {LOAD_S:g} s of chat"
    if left_out:
        detail += f"; {len(left_out)} left out: chat paused for {min(left_out):.1f} ms or more"
    return Check(name, True if clean else None, detail if clean else f"skipped: {detail}")


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
