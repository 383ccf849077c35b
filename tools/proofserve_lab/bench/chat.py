"""What a round costs the chat beside it: changed answers, waiting time, throughput."""

import random
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import chain, combinations, pairwise, product
from typing import Any, TypeVar

from proofserve.host import machine
from proofserve.remote.http import wait_until
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.reports import Figure, Limit, Progress, Report
from proofserve.rounds.status import EngineGauges
from proofserve_lab.bench.statistics import median, quantile
from proofserve_lab.chats import (
    ANSWER_TOKENS,
    Ask,
    Call,
    ClosedLoop,
    Reply,
    ask_all,
    ask_one,
    chats,
    rate_of_completions,
    reading_chat,
)
from proofserve_lab.nodes import (
    bare_speed,
    computing_round,
    gauges_of,
    status_of,
    status_with_gauges,
)

R = TypeVar("R")
AT_ONCE = 8
# vLLM batches eight chats at a time as they arrive, and the batch can change an answer. How many
# answers differ varies by a factor of two from run to run, so there are several runs, in turns.
RUNS_WITH_A_ROUND = 2
# The first answers of a server take longer than all later ones.
WARM_UPS = 8
FIRST_SEED = 1_000
LONGEST_WAIT_BATCHES = 1.05
RESUME_MS = 10.0
THROUGHPUT = 0.98
# By then every client has a request in a running batch.
SETTLE_S = 2.0
AFTERWARDS_S = 30.0
# A proof between two steps of chat about doubles the longest silence of its window. Three times the
# usual silence is more than that: a node that gives way to chat at all did not cause it.
STALL = 3.0
# The share of windows that may be left out; with more of them the others say too little.
TOLERATED = 0.25


def measure_answers(
    node: NodeClient, work: Work, chats_per_run: int, max_tokens: int, progress: Progress
) -> tuple[list[Figure], list[str]]:
    """Ask one chat at a time, without and with a round; then eight at a time, in turns."""

    def ask(what: str, seeds: range, at_once: int) -> list[Reply]:
        progress.step(f"{len(seeds)} chats, {what}", len(seeds))
        # A new salt keeps the prefix cache from helping a later run.
        calls = chats(work.model, seeds, max_tokens, uuid.uuid4().hex)
        return ask_all(node.url, calls, at_once, progress.advance)

    ask("warming up", range(WARM_UPS), AT_ONCE)
    one = range(FIRST_SEED, FIRST_SEED + chats_per_run)
    eight = range(one.stop, one.stop + chats_per_run)
    one_plain = ask("one at a time, no proofs", one, 1)
    with computing_round(node, work):
        one_round = ask("one at a time, a round running", one, 1)
    eight_plain = [ask("eight at a time, no proofs", eight, AT_ONCE)]
    eight_round = []
    for _ in range(RUNS_WITH_A_ROUND):
        with computing_round(node, work):
            eight_round.append(ask("eight at a time, a round running", eight, AT_ONCE))
        eight_plain.append(ask("eight at a time, no proofs, again", eight, AT_ONCE))
    return compare_answers((one_plain, one_round), eight_plain, eight_round)


def compare_answers(
    one: tuple[Sequence[Reply], Sequence[Reply]],
    eight_plain: Sequence[Sequence[Reply]],
    eight_round: Sequence[Sequence[Reply]],
) -> tuple[list[Figure], list[str]]:
    """Compare several runs of the same chats byte for byte; a failed reply equals no other.

    ``one`` holds the runs without and with a round. Eight at a time, what differs is the median of
    all pairs of runs. Returns the figures, and the errors of all runs.
    """
    plain, with_round = one
    asked = len(plain)
    alone_s, beside_s = (median([reply.seconds for reply in replies]) for replies in one)
    between_plain = statistics.median(differing(*pair) for pair in combinations(eight_plain, 2))
    across = statistics.median(differing(*pair) for pair in product(eight_plain, eight_round))
    figures = [
        Figure("chats", asked, "greedy chats in each run"),
        Figure(
            "identical",
            asked - differing(plain, with_round),
            "one at a time: answers that a round does not change, byte for byte",
            Limit(asked),
        ),
        Figure(
            "differing_without_proofs",
            between_plain,
            "eight at a time: answers that differ between two runs without proofs, median of three",
        ),
        Figure(
            "differing_with_proofs",
            across,
            "eight at a time: answers that differ with a round from without, median of six",
            at_most(between_plain),
        ),
        Figure("latency_s_plain", alone_s, "median of a chat, no proofs"),
        Figure("latency_s_round", beside_s, "median of a chat, a round running"),
    ]
    replies = [*plain, *with_round, *chain(*eight_plain, *eight_round)]
    return figures, [reply.error for reply in replies if reply.error]


def differing(some: Sequence[Reply], others: Sequence[Reply]) -> int:
    pairs = zip(some, others, strict=True)
    return sum(bool(a.error or b.error or a.texts != b.texts) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Load:
    """``clients`` chats in flight, of about ``words`` words in and ``tokens`` tokens out.

    Many clients, so that the engine has work even when the API process falls behind. ``pairs`` of
    windows of ``window_s`` seconds, with a round and without: short ones in turns, so that a
    machine whose speed drifts slows both kinds alike.
    """

    clients: int = 64
    words: int = 250
    tokens: int = ANSWER_TOKENS
    window_s: float = 3.0
    pairs: int = 40

    def clients_of(self, node: NodeClient, model: str, ask: Ask[R]) -> ClosedLoop[R]:
        def call(number: int) -> Call:
            return reading_chat(model, number, self.words, self.tokens)

        return ClosedLoop(node.url, call, self.clients, ask)


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a load: instants of the monotonic clock, counters at both, and stored nonces."""

    beside_round: bool
    began: float
    ended: float
    before: EngineGauges
    after: EngineGauges
    proofs: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def proof_s(self) -> float:
        return self.after.busy_s - self.before.busy_s

    @property
    def chat_share(self) -> float:
        """The fraction of the time in which chat held a waiting proof back."""
        return (self.after.deferred_s - self.before.deferred_s) / self.seconds

    @property
    def idle(self) -> float:
        """The fraction of the time, while proofs waited, that neither they nor chat used."""
        return 1 - self.chat_share - self.proof_s / self.seconds


def in_turns(
    node: NodeClient,
    work: Work,
    load: Load,
    progress: Progress,
    settle: Callable[[], None] = lambda: None,
) -> list[Window]:
    """Windows of ``load``, a round in every second one; each pair of them the other way round."""
    windows = []
    for pair in range(load.pairs):
        for beside_round in (False, True) if pair % 2 == 0 else (True, False):
            with node.round(work) if beside_round else nullcontext():
                settle()
                (seen, before), began = status_with_gauges(node), time.monotonic()
                time.sleep(load.window_s)
                (later, after), ended = status_with_gauges(node), time.monotonic()
            proofs = later.processed - seen.processed
            windows.append(Window(beside_round, began, ended, before, after, proofs))
            progress.advance()
    return windows


@dataclass(slots=True)
class Saturation:
    """Chat tokens per second of each window; proofs stored in the windows, and after chat.

    A machine that is short of memory or shared with other work stops now and then for up to half a
    second: no client sends, no server answers, and a proof may rightly run. Such windows are left
    out of every figure and counted as ``stalled``, their proofs as ``proofs_in_stalls``.

    ``chat_share`` is the fraction of each window beside a round in which chat held the engine. Far
    below 1, the engine was idle at times, and proofs may use that time. ``silences`` are the
    longest ones of all windows, in their order.
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
        return statistics.mean(self.beside_round) / statistics.mean(self.plain)


def measure_saturation(node: NodeClient, work: Work, load: Load, progress: Progress) -> Saturation:
    progress.step("saturating chat, with a round in every second window", 2 * load.pairs)
    with ExitStack() as last_round:
        with load.clients_of(node, work.model, ask_one) as loop:
            loop.settle(SETTLE_S)
            windows = in_turns(node, work, load, progress)
            last_round.enter_context(node.round(work))
        before = status_of(node).processed
        wait_until(lambda: status_of(node).processed > before, "proofs after chat", AFTERWARDS_S)
        afterwards = status_of(node).processed - before
    return read_windows(windows, loop.replies, afterwards)


def read_windows(
    windows: Sequence[Window], replies: Sequence[Reply], afterwards: int
) -> Saturation:
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


def _tokens_per_s(replies: Sequence[Reply], window: Window) -> float:
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


def longest_silence(replies: Sequence[Reply], began: float, ended: float) -> float:
    """Seconds of the longest time without a reply in a window.

    It may begin before the window: a proof of a stall just before it is stored inside the window.
    """
    last_before = max((reply.ended for reply in replies if reply.ended <= began), default=began)
    inside = sorted(reply.ended for reply in replies if began < reply.ended < ended)
    return max(later - earlier for earlier, later in pairwise([last_before, *inside, ended]))


def stall_s(usual: Sequence[float]) -> float:
    """Seconds above which a silence is a stall, from the silences of ordinary windows."""
    return STALL * statistics.median(usual)


def bench_chat(
    node: NodeClient,
    work: Work,
    chats_per_run: int,
    max_tokens: int,
    load: Load,
    progress: Progress,
) -> Report:
    """Chats in each of seven runs, then the saturating ``load``."""
    answers, errors = measure_answers(node, work, chats_per_run, max_tokens, progress)
    saturation = measure_saturation(node, work, load, progress)
    engine, where = gauges_of(node), {**machine(), **node.versions()}
    figures, windows = chat_figures(answers, errors, saturation, engine)
    chat = {"chats": chats_per_run, "max_tokens": max_tokens}
    setup = {"work": asdict(work), **chat, "load": asdict(load)}
    return Report("chat-priority", figures, setup, windows, where)


def chat_figures(
    answers: Sequence[Figure], errors: Sequence[str], saturation: Saturation, engine: EngineGauges
) -> tuple[tuple[Figure, ...], dict[str, Any]]:
    errors = [*errors, *saturation.errors]
    figures = (
        *answers,
        Figure("errors", len(errors), "chats refused, cut off or aborted", at_most(0)),
        Figure(
            "extra_wait_max_batches",
            engine.longest_chat_wait_batches,
            "longest wait of a chat for proofs, in forwards, since the engine's start",
            at_most(LONGEST_WAIT_BATCHES),
        ),
        Figure(
            "resume_ms_p50",
            median(engine.resume_ms),
            "end of the last chat step to the next proof forward, median",
            at_most(RESUME_MS),
        ),
        Figure("resume_ms_p95", quantile(engine.resume_ms, 0.95), "the same, 95 of 100"),
        *_saturation_figures(saturation),
    )
    windows = {
        "plain_tokens_per_second": saturation.plain,
        "round_tokens_per_second": saturation.beside_round,
        "longest_silence_s": saturation.silences,
        "errors": errors[:20],
        "longest_chat_wait_s": engine.longest_chat_wait_s,
        "resume_ms_count": len(engine.resume_ms),
    }
    return figures, windows


def at_most(bound: float) -> Limit:
    return Limit(bound, at_most=True)


def _saturation_figures(seen: Saturation) -> tuple[Figure, ...]:
    windows = len(seen.beside_round) + seen.stalled_beside_round
    few, left_out = at_most(TOLERATED * windows), "left out because the machine stood still"
    without, beside = seen.stalled_plain, seen.stalled_beside_round
    return (
        Figure("stalled_windows_plain", without, f"of {windows} without a round, {left_out}", few),
        Figure("stalled_windows_round", beside, f"of {windows} beside a round, {left_out}", few),
        Figure("tokens_per_second", median(seen.plain), "saturating chat, no proofs"),
        Figure(
            "throughput_ratio",
            seen.throughput_ratio,
            "saturating chat with a round active, over without",
            Limit(THROUGHPUT),
        ),
        Figure(
            "chat_share",
            median(seen.chat_share),
            "share of the time beside a round in which chat had the engine",
        ),
        Figure(
            "proofs_while_saturated",
            seen.proofs_while_saturated,
            "nonces stored beside saturating chat, in the windows that count",
            at_most(0),
        ),
        Figure("proofs_in_stalls", seen.proofs_in_stalls, "nonces stored in the windows left out"),
        Figure("proofs_afterwards", seen.proofs_afterwards, "nonces stored after chat", Limit(1)),
    )


# -- chats that arrive at random moments, one at a time --------------------------------------------

# The longest pause before a chat, seconds: some forwards of any model, or a part of one.
PAUSE_S = 0.5
# A machine wakes a thread late now and then.
OVER = 1.1
# Of the pauses.
SEED = 1
# What runs beside the chats.
BESIDE = {"plain": "no proofs", "round": "a round running"}


def bench_waits(node: NodeClient, work: Work, count: int, progress: Progress) -> Report:
    """The times of ``count`` chats of one token without a round of ``work``, and beside one."""

    def ask(number: int, what: str) -> list[float]:
        pauses, seconds = random.Random(SEED), []  # noqa: S311
        progress.step(f"{number} chats, one at a time, {what}", number)
        for call in chats(work.model, range(number), 1, uuid.uuid4().hex):
            time.sleep(pauses.uniform(0, PAUSE_S))
            (reply,) = ask_all(node.url, [call], 1, progress.advance)
            if not reply.error:
                seconds.append(reply.seconds)
        return seconds

    ask(WARM_UPS, "warming up")
    whole_s = bare_speed(node, work, 2).seconds_per_forward
    found = {"plain": ask(count, BESIDE["plain"])}
    with computing_round(node, work):
        found["round"] = ask(count, BESIDE["round"])
    engine = gauges_of(node)
    longest_ms, allowed_ms = engine.longest_chat_wait_s * 1e3, engine.max_wait_s * 1e3
    figures = (
        *(
            Figure(
                f"chat_ms_p{share}_{name}",
                (quantile(seconds, share / 100) or 0.0) * 1e3,
                f"a chat of one token, {share} of 100, {BESIDE[name]}",
            )
            for name, seconds in found.items()
            for share in (50, 99)
        ),
        Figure(
            "longest_wait_ms",
            longest_ms,
            f"longest wait for proofs in the engine, of which {allowed_ms:.0f} are allowed",
            at_most(OVER * allowed_ms),
        ),
        Figure("whole_forward_s", whole_s, "a forward that does not pause"),
        Figure("forward_nonces", engine.forward_nonces, "nonces of a forward"),
        Figure("part_ms", engine.part_s * 1e3, "the longest part of a forward, usually"),
    )
    setup = {"work": asdict(work), "chats": count, "seed": SEED}
    windows = {f"{name}_s": seconds for name, seconds in found.items()}
    return Report("chat's waits", figures, setup, windows, {**machine(), **node.versions()})
