"""The steps that need a server: ``python -m gpu.served generation|chat|same-batch``.

Each starts a server of its own, or measures the running one at ``--url``. Two of them measure by
the same functions as ``proofserve bench``. The third compares proofs in the same batch as chat with
forwards of their own: what does each cost chat?

A forward of its own stops chat for its time. A prompt of as many tokens, sent to vLLM as a request
of low priority, shares the steps in which chat decodes. Where decoding waits for memory, such a
step has arithmetic to spare (native.md, section 7). Here both are measured beside one steady load
of chat on one server, in windows in turns: chat alone, with dedicated forwards, with prompts.
Such a prompt reads random tokens, as ``sketch-v1`` does; its sketch is not made.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gpu.report import step_parser
from proofserve.cli.model import checkpoint_named
from proofserve.cli.servers import ServerOptions, existing_server, serving
from proofserve.cli.session import EXIT_FAILED, CommandSession, open_session
from proofserve.host import machine
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.reports import Figure, Limit, Progress, Report
from proofserve_lab.bench.chat import Load, bench_chat
from proofserve_lab.bench.command import show
from proofserve_lab.bench.generation import GenerationPlan, bench_generation
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

# As `proofserve bench generation` on models whose forwards are short.
BUSY = 0.95
SHARE = 0.2
MAX_TOKENS = 16
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
            with _proofs(node, plan, kind, sequences, readings.errors) as tokens:
                time.sleep(SETTLE_S)
                before, began = tokens(), time.monotonic()
                time.sleep(plan.window_s)
                after, ended = tokens(), time.monotonic()
            readings.windows[kind].append(LoadWindow(began, ended, float(after - before)))
    readings.streams = loop.replies
    return same_batch_report(plan, readings, {**machine(), **node.versions()})


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


def generation(
    options: argparse.Namespace, work: Work, node: NodeClient, progress: Progress
) -> Report:
    seconds = options.seconds * options.windows
    return bench_generation(node, GenerationPlan(work, seconds, options.windows, BUSY), progress)


def chat(options: argparse.Namespace, work: Work, node: NodeClient, progress: Progress) -> Report:
    load = Load(options.clients, window_s=options.seconds, pairs=options.windows)
    return bench_chat(node, work, options.chats, MAX_TOKENS, load, progress)


def same_batch(
    options: argparse.Namespace, work: Work, node: NodeClient, progress: Progress
) -> Report:
    windows = options.seconds, options.windows
    plan = SameBatchPlan(work, options.clients, *windows, options.priority)
    return measure_same_batch(node, plan, progress)


KINDS = {"generation": generation, "chat": chat, "same-batch": same_batch}


@contextmanager
def node_of(
    options: argparse.Namespace, session: CommandSession
) -> Iterator[tuple[NodeClient, str]]:
    """The node to measure, and the name of its model."""
    if options.url is not None:
        with existing_server(options.url, None, session) as node:
            yield node, node.models()[0]
        return
    session.line.step(f"writing {options.model}, unless it is there")
    found = checkpoint_named(options.model, options.size)
    apart = options.kind == "same-batch"
    server = ServerOptions(
        found.folder,
        found.name,
        options.batch,
        measure=True,
        share=SHARE if apart else 0.0,
        eager=not options.graphs,
        vllm_options=("--scheduling-policy", "priority") if apart else (),
    )
    with serving(server, session) as node:
        yield node, found.name


def main() -> int:
    """0, or 1 if a figure breaks its limit."""
    options = _parser().parse_args()
    with open_session() as session:
        with node_of(options, session) as (node, name):
            work = Work(name, seq_len=options.seq_len, batch_size=options.batch)
            report = KINDS[options.kind](options, work, node, session.line)
        show(report, options.json, session)
    return 0 if report.passed else EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = step_parser(__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--url", help="a running node; else a server is started")
    parser.add_argument("--model", default="qwen")
    parser.add_argument("--size", default="0.6b")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs for chat")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=128, help="nonces in a call and a forward")
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window")
    parser.add_argument("--priority", type=int, default=1, help="of prompts beside chat; chat: 0")
    return parser


if __name__ == "__main__":
    sys.exit(main())
