"""Proofs in the same batch as chat, against forwards of their own: what does each cost chat?

A forward of its own stops chat for its time. A prompt of as many tokens, sent to vLLM as a request
of low priority, shares the steps in which chat decodes. Where decoding waits for memory, such a
step has arithmetic to spare (native.md, section 7). Here both are measured beside one steady load
of chat on one server, in windows in turns: chat alone, with dedicated forwards, with prompts.

Such a prompt reads random tokens, as ``sketch-v1`` does; its sketch is not made.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from proofserve.host import machine
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.reports import Figure, Limit, Progress, Report
from proofserve_lab.bench.statistics import median, quantile
from proofserve_lab.chats import (
    Call,
    ClosedLoop,
    Reply,
    Stream,
    ask_one,
    reading_chat,
    stream_answer,
    tokens_between,
)
from proofserve_lab.nodes import bare_speed, gauges_of

ALONE, DEDICATED, SAME_BATCH = "alone", "dedicated", "same_batch"
# Short questions and long answers: chat that decodes most of the time.
WORDS, TOKENS = 16, 256
# Requests of prompts in flight: vLLM always has one for its next step.
IN_FLIGHT = 4
SETTLE_S = 1.0
# Every model's vocabulary has this many tokens.
TOKEN_IDS = 1000


@dataclass(frozen=True, slots=True)
class SameBatchPlan:
    """``windows`` of ``window_s`` seconds of each kind beside ``clients`` chats in flight.

    ``priority`` is that of the prompts, for a server with ``--scheduling-policy priority``, where
    chat has 0 and lower numbers go first; 0 for any other server.
    """

    work: Work
    clients: int
    window_s: float
    windows: int
    priority: int


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """Two instants of the monotonic clock, and the tokens of proofs computed between them."""

    began: float
    ended: float
    proof_tokens: float

    @property
    def proof_rate(self) -> float:
        return self.proof_tokens / (self.ended - self.began)


@dataclass(slots=True)
class SameBatchReadings:
    """All windows by kind, every chat, and the errors of prompts."""

    windows: dict[str, list[LoadWindow]] = field(
        default_factory=lambda: {ALONE: [], DEDICATED: [], SAME_BATCH: []}
    )
    streams: Sequence[Stream] = ()
    errors: list[str] = field(default_factory=list)

    def chat(self, kind: str) -> list[float]:
        """Tokens of chat per second of each window."""
        return [
            tokens_between(self.streams, each.began, each.ended) / (each.ended - each.began)
            for each in self.windows[kind]
        ]

    def lost_per_proof_token(self, kind: str) -> float | None:
        """Tokens of chat that one token of proofs costs, in the median of all windows.

        None if no proof was computed beside chat.
        """
        alone = median(self.chat(ALONE)) or 0.0
        rates = (each.proof_rate for each in self.windows[kind])
        pairs = zip(self.chat(kind), rates, strict=True)
        return median([(alone - chat) / rate for chat, rate in pairs if rate > 0])

    def gap_ms(self, kind: str, share: float) -> float | None:
        gaps = [
            gap
            for window in self.windows[kind]
            for stream in self.streams
            for gap in stream.gaps(window.began, window.ended)
        ]
        found = quantile(gaps, share)
        return None if found is None else 1e3 * found


def measure_same_batch(node: NodeClient, plan: SameBatchPlan, progress: Progress) -> Report:
    """Measure all three kinds beside one load. Raises ReportedError as NodeClient."""
    readings = SameBatchReadings()
    sequences = bare_speed(node, plan.work, 2).sequences

    def call(number: int) -> Call:
        return reading_chat(plan.work.model, number, WORDS, TOKENS)

    with ClosedLoop(node.url, call, plan.clients, stream_answer) as loop:
        loop.settle(SETTLE_S)
        text = "chat alone, beside proofs, and with prompts in its batch"
        for kind in progress.over(text, [ALONE, DEDICATED, SAME_BATCH] * plan.windows):
            readings.windows[kind].append(_window(node, plan, kind, sequences, readings.errors))
    readings.streams = loop.replies
    return same_batch_report(plan, readings, {**machine(), **node.versions()})


def _window(
    node: NodeClient, plan: SameBatchPlan, kind: str, sequences: int, errors: list[str]
) -> LoadWindow:
    with _proofs(node, plan, kind, sequences, errors) as tokens:
        time.sleep(SETTLE_S)
        before, began = tokens(), time.monotonic()
        time.sleep(plan.window_s)
        after, ended = tokens(), time.monotonic()
    return LoadWindow(began, ended, float(after - before))


@contextmanager
def _proofs(
    node: NodeClient, plan: SameBatchPlan, kind: str, sequences: int, errors: list[str]
) -> Iterator[Callable[[], int]]:
    """Proofs of one kind run meanwhile; the function gives their tokens so far."""
    if kind == ALONE:
        yield lambda: 0
    elif kind == DEDICATED:
        with node.round(plan.work):
            yield lambda: gauges_of(node).forwards * sequences * plan.work.seq_len
    else:
        with _prompts(node, plan) as loop:
            yield lambda: sum(reply.prompt_tokens for reply in [*loop.replies])
        errors += [reply.error for reply in loop.replies if reply.error]


def _prompts(node: NodeClient, plan: SameBatchPlan) -> ClosedLoop[Reply]:
    """Prompts of ``seq_len`` tokens, one answer token each, as long as the context."""
    # New tokens each time: no prompt may be found in the prefix cache.
    draw = np.random.default_rng()
    priority = {"priority": plan.priority} if plan.priority else {}

    def call(_number: int) -> Call:
        prompt = draw.integers(0, TOKEN_IDS, plan.work.seq_len).tolist()
        body = {"model": plan.work.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        return Call("/v1/completions", {**body, **priority})

    return ClosedLoop(node.url, call, IN_FLIGHT, ask_one)


def same_batch_report(
    plan: SameBatchPlan, found: SameBatchReadings, where: Mapping[str, Any]
) -> Report:
    errors = [*found.errors, *(stream.error for stream in found.streams if stream.error)]
    costs = {kind: found.lost_per_proof_token(kind) for kind in (DEDICATED, SAME_BATCH)}
    ours, theirs = costs[DEDICATED], costs[SAME_BATCH]
    ratio = theirs / ours if ours and theirs is not None and ours > 0 else None
    figures = (
        *(figure for kind in found.windows for figure in _figures(found, kind)),
        Figure(
            "same_batch_over_dedicated",
            ratio,
            "what a proof token costs chat in its batch, over that of a forward of its own",
        ),
        Figure("errors", len(errors), "chats and prompts that failed", Limit(0, at_most=True)),
    )
    windows = {kind: [asdict(each) for each in found.windows[kind]] for kind in found.windows}
    return Report(
        "proofs in the batch of chat",
        figures,
        asdict(plan),
        {**windows, "errors": errors[:20]},
        where,
    )


def _figures(found: SameBatchReadings, kind: str) -> tuple[Figure, ...]:
    beside = {ALONE: "no proofs", DEDICATED: "dedicated forwards", SAME_BATCH: "prompts in batch"}
    chat = Figure(f"chat_tokens_per_second_{kind}", median(found.chat(kind)), beside[kind])
    gap = Figure(
        f"gap_ms_p99_{kind}", found.gap_ms(kind, 0.99), "between two tokens of a chat, 99 of 100"
    )
    if kind == ALONE:
        return (chat, gap)
    rate = median([each.proof_rate for each in found.windows[kind]])
    return (
        chat,
        gap,
        Figure(f"proof_tokens_per_second_{kind}", rate, "of proofs beside that chat"),
        Figure(
            f"chat_tokens_lost_per_proof_token_{kind}",
            found.lost_per_proof_token(kind),
            "tokens of chat that one token of proofs costs",
        ),
    )
