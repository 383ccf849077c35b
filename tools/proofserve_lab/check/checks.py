"""Checks of a running server: do its proofs and its chat behave as the documents say?

Smoke: chat answers, proofs are valid and repeatable, a round counts correctly. Coexistence: chat
and proofs share one engine, and chat goes first, in four cases.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

import numpy as np

from proofserve.protocol import SKETCHES
from proofserve.protocol.errors import MalformedVector
from proofserve.protocol.network_schemes import is_winner
from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.http import wait_until
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import AnyWork, DistanceWork, Work, vectors_of
from proofserve.reports import TooSlowError
from proofserve.rounds.records import Winner
from proofserve.wire import PROOFS
from proofserve_lab.chats import (
    Call,
    ClosedLoop,
    Reply,
    ask_all,
    ask_one,
    chat,
    chats,
    reading_chat,
)
from proofserve_lab.nodes import (
    computing_round,
    distances,
    gauges_of,
    has_chat,
    last_seq,
    status_of,
)

W = TypeVar("W", Work, DistanceWork)

# The diameter of a sphere of radius 1, and the rounding error of a float32.
LARGEST = 2.0 + 1e-6
# Distances have a standard deviation of 0.008, so the median difference of unrelated ones is 0.007.
UNRELATED_DISTANCES = 5e-4
# About a third of the nonces win, so that a round has winners and others.
R_TARGET = 1.41
# How many of the round's nonces are computed again.
RECOMPUTED = 64
STATES = ("IDLE", "GENERATING", "VALIDATING", "STOPPED")
NONCES = range(12)
# The same nonces in reverse order and in other batches.
AGAIN = (range(11, 6, -1), range(6, 1, -1), range(1, -1, -1))
# A float16 of a number below 1 is off by 2^-12 at most.
NORM_TOLERANCE = 2e-3
# The length of a sketch is 1 on average. So many standard deviations are improbable.
SKETCH_DEVIATIONS = 6.0
# Unrelated unit vectors are about 1.4 apart; two engines of one model about 0.01.
UNRELATED = 0.2
ROUND_S = 60.0

# Of coexistence: chats one after the other.
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


@dataclass(frozen=True, slots=True)
class Check:
    """``detail`` says what was measured. ``passed`` is None for a check that was skipped."""

    name: str
    passed: bool | None
    detail: str


# Gets each check as it is made. Generators would not do: an interrupted caller would leave a
# suspended generator behind that still holds a running server.
Reporter = Callable[[Check], None]


def smoke(node: NodeClient, works: Sequence[AnyWork], report: Reporter) -> None:
    """Report a check of chat, then those of each order. Raises NodeError for a refused call."""
    (reply,) = ask_all(node.url, [chat(works[0].model, "Say something.", 8)], 1)
    if reply.error is not None and not has_chat(node):
        report(Check("chat answers", None, "skipped: a fleet proves, its gateway chats"))
    else:
        detail = reply.error or f"{reply.completion_tokens} tokens in {reply.seconds * 1e3:.0f} ms"
        report(Check("chat answers", reply.error is None, detail))
    for work in works:
        if isinstance(work, DistanceWork):
            distance_smoke(node, work, report)
        else:
            artifact_smoke(node, work, report)


def artifact_smoke(node: NodeClient, work: Work, report: Reporter) -> None:
    ours = node.artifacts(work, NONCES)
    report(_vectors_are_valid(ours, work))
    # Order and batch size must not change a single bit.
    again = node.artifacts(replace(work, batch_size=5), tuple(reversed(NONCES)))
    detail = "computed again in reverse order and in other batches"
    report(Check("the same nonce gives the same bits", again[::-1] == ours, detail))
    for what, other in _others(work).items():
        nearest = min(distances(ours, node.artifacts(other, NONCES), work.width))
        detail = f"nearest pair {nearest:.2f} apart"
        report(Check(f"{what} gives other values", nearest > UNRELATED, detail))
    _round_counts(node, work, report)


def _others(work: W) -> dict[str, W]:
    """Orders whose results are unrelated to those of ``work``, by what differs."""
    key, block = "another key", "another block"
    return {key: replace(work, public_key=key), block: replace(work, block_hash=block)}


def _vectors_are_valid(claims: Sequence[Claim], work: Work) -> Check:
    name = "vectors are valid"
    if [claim.nonce for claim in claims] != list(NONCES):
        return Check(name, False, f"asked for {list(NONCES)}, got {[c.nonce for c in claims]}")
    try:
        vectors = vectors_of(claims, work.width)
    except MalformedVector as error:
        return Check(name, False, str(error))
    rows = np.concatenate([vector.reshape(-1, work.k_dim) for vector in vectors.values()])
    off = float(np.abs(np.linalg.norm(rows, axis=1) - 1.0).max())
    spread = math.sqrt(1 / (2 * work.k_dim)) if work.scheme in SKETCHES else 0.0
    detail = f"{len(vectors)} of {work.width} finite numbers, length 1 within {off:.1e}"
    return Check(name, off < NORM_TOLERANCE + SKETCH_DEVIATIONS * spread, detail)


def _round_counts(node: NodeClient, work: Work, report: Reporter) -> None:
    after = last_seq(node)
    with node.round(work):
        running = status_of(node).state
        wait_until(lambda: status_of(node).processed > 0, "first result of a round", ROUND_S)
    status = status_of(node)
    rows = [row for row in node.results(after) if row.round_id == status.round_id]
    nonces = [row.nonce for row in rows if row.value is not None]
    counts = f"{status.processed} counted, {len(nonces)} stored, {status.rate:.1f} nonces/s"
    report(Check("a round counts what it stores", 0 < status.processed == len(nonces), counts))
    # Each lane has its first nonces, each once and without a gap.
    lanes: dict[int, list[int]] = {}
    for nonce in nonces:
        lanes.setdefault(nonce % status.lanes, []).append(nonce // status.lanes)
    complete = all(sorted(indices) == list(range(len(indices))) for indices in lanes.values())
    detail = f"{len(nonces)} of {len(lanes)} lanes"
    report(Check("a round skips no nonce", complete, detail))
    states = (running, status.state)
    as_expected = states == ("GENERATING", "STOPPED")
    report(Check("a round reports its states", as_expected, ", then ".join(states)))


def distance_smoke(node: NodeClient, work: DistanceWork, report: Reporter) -> None:
    with node.judging(work):
        ours = _recomputed(node, work, NONCES)
        # In one round, because the next may have forwards of another size (ADR 48).
        again = dict(pair for part in AGAIN for pair in _recomputed(node, work, part).items())
    least, most = min(ours.values()), max(ours.values())
    valid = all(math.isfinite(d) and 0.0 <= d <= LARGEST for d in ours.values())
    report(Check("distances are valid", valid, f"{len(ours)} from {least:.4f} to {most:.4f}"))
    detail = "computed again in reverse order and in other batches"
    report(Check("the same nonce gives the same distance", again == ours, detail))
    for what, other in _others(work).items():
        with node.judging(other):
            theirs = _recomputed(node, other, NONCES)
        # Two unrelated numbers may be close by chance; half of a dozen pairs are not.
        middle = median(abs(ours[nonce] - theirs[nonce]) for nonce in ours)
        detail = f"the median difference is {middle:.4f}"
        report(Check(f"{what} gives other distances", middle > UNRELATED_DISTANCES, detail))
    distance_round(node, replace(work, r_target=R_TARGET), report)


def distance_round(node: NodeClient, work: DistanceWork, report: Reporter) -> None:
    """Report the checks of one round, from its configuration to its end."""

    def has_enough() -> bool:
        status = status_of(node)
        return status.processed >= RECOMPUTED and status.found > 0

    after = last_seq(node)
    states = []
    node.ask("POST", f"{PROOFS}/init", work.body)
    try:
        states.append(status_of(node).state)
        node.ask("POST", f"{PROOFS}/phase/generate")
        states.append(status_of(node).state)
        wait_until(has_enough, "first winners of a round", ROUND_S)
        node.ask("POST", f"{PROOFS}/phase/validate")
        counted = status_of(node)
        rows = [row for row in node.results(after) if row.round_id == counted.round_id]
        computed = _recomputed(node, work, counted.tried()[:RECOMPUTED])
    finally:
        node.stop()
    states += [counted.state, status_of(node).state]
    winners = {row.nonce: row.distance for row in rows if row.distance is not None}
    counts = f"{counted.found} of {counted.processed} counted, {len(winners)} stored"
    as_counted = 0 < counted.found <= counted.processed and counted.found == len(winners)
    detail = f"{counts}, {counted.rate:.1f} nonces/s"
    report(Check("a round counts the winners it stores", as_counted, detail))
    above = [n for n, distance in winners.items() if not is_winner(distance, R_TARGET)]
    farthest = max(winners.values(), default=math.nan)
    detail = f"{len(above)} are not; the largest distance is {farthest:.4f}"
    report(Check(f"every winner is below {R_TARGET:g}", not above, detail))
    stored = {nonce: d for nonce, d in winners.items() if nonce in computed}
    winning = {nonce: d for nonce, d in computed.items() if is_winner(d, R_TARGET)}
    won = f"{len(winning)} win when recomputed, {len(stored)} stored"
    as_stored, detail = bool(winning) and stored == winning, f"of the first {RECOMPUTED}, {won}"
    report(Check("a round stores exactly its winners", as_stored, detail))
    as_expected = tuple(states) == STATES
    report(Check("a distance round reports its states", as_expected, ", then ".join(states)))


def _recomputed(node: NodeClient, work: DistanceWork, nonces: Iterable[int]) -> Mapping[int, float]:
    """The distances that the configured round computes for ``nonces``; our claims do not matter."""
    claims = [Winner(nonce, 0.0) for nonce in nonces]
    computed = node.judge(work, claims).computed_distances
    return {claim.nonce: distance for claim, distance in zip(claims, computed, strict=True)}


def coexist(node: NodeClient, work: AnyWork, report: Reporter) -> None:
    """Report the checks of each case. Raises NodeError if the node refuses a call."""
    with computing_round(node, work):
        replies = ask_all(node.url, chats(work.model, range(CHATS), 16, "coexist"), 1)
        slowest = max(reply.seconds for reply in replies) * 1e3
        report(_completed("chat completes during a round", replies, f"slowest {slowest:.0f} ms"))
        report(_resumes(node, "proofs resume after chat"))
        report(_full_speed_when_idle(node))
    with _endless_chat(node, work) as loop:
        loop.settle(SETTLE_S)
        with node.round(work):
            state = status_of(node).state
            report(Check("a round starts while chat is active", state == "GENERATING", state))
            report(_no_proofs(node, "the round waits until that chat has ended"))
            loop.finish()
            name = "chat completes although a round has started"
            report(_completed(name, loop.replies, f"{CLIENTS} at a time"))
            report(_resumes(node, "proofs start when chat has ended"))
    with computing_round(node, work):
        with _endless_chat(node, work) as loop:
            loop.settle(SETTLE_S)
            report(_no_proofs(node, "a running round pauses while chat is active"))
        name = "chat completes beside a paused round"
        report(_completed(name, loop.replies, f"{CLIENTS} at a time"))
        wait = gauges_of(node).longest_chat_wait_batches
        name, detail = "no chat request waits for more than one forward", f"{wait:.2f} forwards"
        report(Check(name, wait <= LONGEST_WAIT_BATCHES, f"longest wait so far: {detail}"))
        report(_resumes(node, "a paused round resumes after chat"))


def _endless_chat(node: NodeClient, work: AnyWork) -> ClosedLoop[Reply]:
    def call(number: int) -> Call:
        return reading_chat(work.model, number, WORDS)

    return ClosedLoop(node.url, call, CLIENTS, ask_one)


def _full_speed_when_idle(node: NodeClient) -> Check:
    """The best of some windows: in one of them the machine may have stood still."""
    share, forwards = 0.0, 0
    for _ in range(WINDOWS):
        before, began = gauges_of(node), time.monotonic()
        time.sleep(FULL_SPEED_S)
        after, ended = gauges_of(node), time.monotonic()
        found = (after.busy_s - before.busy_s) / (ended - began)
        share, forwards = max((share, forwards), (found, after.forwards - before.forwards))
        if share >= FULL_SPEED:
            break
    detail = f"{share:.0%} of the time in forwards, {forwards} of them"
    return Check("proofs run at full speed while chat is idle", share >= FULL_SPEED, detail)


def _no_proofs(node: NodeClient, name: str) -> Check:
    """Fails if chat paused for less than the grace before a forward, by the engine's clock.

    Proofs may use a longer pause, in which the machine stood still; its window is measured again.
    """
    clean, left_out = 0, list[float]()
    while clean < WINDOWS and clean + len(left_out) < MOST_WINDOWS:
        before = gauges_of(node).forwards
        time.sleep(LOAD_S)
        after = gauges_of(node)
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


def _completed(name: str, replies: Sequence[Reply], detail: str) -> Check:
    errors = [reply.error for reply in replies if reply.error]
    if errors:
        return Check(name, False, f"{len(errors)} of {len(replies)} failed: {errors[0]}")
    complete = all(reply.completion_tokens > 0 for reply in replies)
    return Check(name, complete and bool(replies), f"{len(replies)} chats, {detail}")


def _resumes(node: NodeClient, name: str) -> Check:
    before = status_of(node).processed
    try:
        seconds = wait_until(lambda: status_of(node).processed > before, "new proofs", RESUME_S)
    except TooSlowError as error:
        return Check(name, False, str(error))
    return Check(name, True, f"new results after {seconds:.1f} s")
