"""Chat that never pauses, with and without a round beside it."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median

from proofserve.lab.chats import (
    Call,
    Reply,
    ask_one,
    closed_loop,
    rate_of_completions,
    reading_chat,
)
from proofserve.lab.node_client import NodeClient, wait_until
from proofserve.lab.records import NodeStatus, Work
from proofserve.lab.report import Progress

# By then every client has a request in a running batch.
SETTLE_S = 2.0
AFTERWARDS_S = 30.0
# A proof between two steps of chat about doubles the longest silence of its window. Three times the
# usual silence is more than that: a node that gives way to chat at all did not cause it.
STALL = 3.0
# The share of windows that may be left out; with more of them the others say too little.
TOLERATED = 0.25


@dataclass(frozen=True, slots=True)
class Load:
    """``clients`` chats in flight with prompts of about ``words`` words; ``pairs`` of windows.

    Many clients, so that the engine has work even when the API process falls behind. Short windows
    in turns, so that a machine whose speed drifts slows both kinds alike.
    """

    clients: int = 64
    words: int = 250
    window_s: float = 3.0
    pairs: int = 40


@dataclass(slots=True)
class Saturation:
    """Chat tokens per second of each window; proofs stored in the windows, and after chat.

    A machine that is short of memory or shared with other work stops now and then for up to half a
    second: no client sends, no server answers, and the engine is idle. A proof may rightly run
    then. Such windows are left out of every figure and counted as ``stalled``, their proofs as
    ``proofs_in_stalls``.

    ``chat_share`` is the fraction of each window beside a round in which chat held the engine. Far
    below 1, the engine was idle at times (because the API process was too slow, for example), and
    proofs may use that time. ``silences`` are the longest ones of all windows, in their order.
    """

    plain: list[float] = field(default_factory=list)
    beside_round: list[float] = field(default_factory=list)
    chat_share: list[float] = field(default_factory=list)
    stalled_plain: int = 0
    stalled_beside_round: int = 0
    silences: list[float] = field(default_factory=list)
    proofs_while_saturated: int = 0
    proofs_in_stalls: int = 0
    proofs_afterwards: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def throughput_ratio(self) -> float | None:
        """The mean of the windows beside a round, over the mean of those without."""
        if not self.beside_round or not any(self.plain):
            return None
        return mean(self.beside_round) / mean(self.plain)


@dataclass(frozen=True, slots=True)
class _Window:
    """A part of the load: two instants of the monotonic clock, and the node's status at both."""

    beside_round: bool
    began: float
    ended: float
    before: NodeStatus
    after: NodeStatus

    @property
    def proofs(self) -> int:
        return self.after.processed - self.before.processed

    @property
    def chat_share(self) -> float:
        """The fraction of the time in which chat held a waiting proof back."""
        return (_deferred_s(self.after) - _deferred_s(self.before)) / (self.ended - self.began)


def measure_saturation(node: NodeClient, work: Work, load: Load, progress: Progress) -> Saturation:
    """One steady load, a round in every second window; each pair of windows the other way round."""
    windows = []
    progress.step("saturating chat, with a round in every second window", 2 * load.pairs)

    def call(number: int) -> Call:
        return reading_chat(work.model, number, load.words)

    with ExitStack() as last_round:
        with closed_loop(node.url, call, load.clients, ask_one) as loop:
            loop.settle(SETTLE_S)
            for pair in range(load.pairs):
                for beside_round in (False, True) if pair % 2 == 0 else (True, False):
                    with node.round(work) if beside_round else nullcontext():
                        windows.append(_window(node, load.window_s, beside_round))
                    progress.advance()
            last_round.enter_context(node.round(work))
        afterwards = _resumed(node)
    return _read(windows, loop.replies, afterwards)


def _window(node: NodeClient, seconds: float, beside_round: bool) -> _Window:
    before, began = node.status(), time.monotonic()
    time.sleep(seconds)
    after, ended = node.status(), time.monotonic()
    return _Window(beside_round, began, ended, before, after)


def _read(windows: Sequence[_Window], replies: Sequence[Reply], afterwards: int) -> Saturation:
    silences = [longest_silence(replies, window.began, window.ended) for window in windows]
    errors = [reply.error for reply in replies if reply.error]
    read = Saturation(silences=silences, proofs_afterwards=afterwards, errors=errors)
    # Only windows of chat alone show what is usual: with the others, a node that does not give way
    # to chat would raise the bound by which it is judged.
    alone = [s for s, window in zip(silences, windows, strict=True) if not window.beside_round]
    longest = stall_s(alone)
    for window, silence in zip(windows, silences, strict=True):
        if silence > longest:
            read.stalled_beside_round += window.beside_round
            read.stalled_plain += not window.beside_round
            read.proofs_in_stalls += window.proofs
        elif window.beside_round:
            read.beside_round.append(_tokens_per_s(replies, window))
            read.chat_share.append(window.chat_share)
            read.proofs_while_saturated += window.proofs
        else:
            read.plain.append(_tokens_per_s(replies, window))
    return read


def _tokens_per_s(replies: Sequence[Reply], window: _Window) -> float:
    """From the first to the last answer within the window; 0 with less than two answers.

    Requests that lie across an edge of the window do not count.
    """
    early = sum(reply.ended < window.began for reply in replies)
    inside = [reply.ended for reply in replies if window.began <= reply.ended < window.ended]
    if len(inside) < 2:
        return 0.0
    return rate_of_completions(
        replies, early + 1, max(inside), lambda reply: reply.prompt_tokens + reply.completion_tokens
    )


def _resumed(node: NodeClient) -> int:
    before = node.status().processed
    wait_until(lambda: node.status().processed > before, "proofs after chat", AFTERWARDS_S)
    return node.status().processed - before


def _deferred_s(status: NodeStatus) -> float:
    return status.engine.deferred_s if status.engine else 0.0


def longest_silence(replies: Sequence[Reply], began: float, ended: float) -> float:
    """Seconds of the longest time without a reply in a window.

    A silence across the window's beginning counts from the reply before it: the engine may have
    computed a proof in a stall just before the window, which is stored inside the window.
    """
    last_before = max((reply.ended for reply in replies if reply.ended <= began), default=began)
    inside = sorted(reply.ended for reply in replies if began < reply.ended < ended)
    return max(later - earlier for earlier, later in pairwise([last_before, *inside, ended]))


def stall_s(usual: Sequence[float]) -> float:
    """Seconds above which a silence is a stall, from the silences of ordinary windows."""
    return STALL * median(usual)
