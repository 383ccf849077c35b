"""How much of the engine's speed a round keeps, and how that compares with vLLM's prefill."""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from proofserve.host import machine
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import AnyWork
from proofserve.reports import Figure, Limit, Progress, Report, ReportedError, TooSlowError
from proofserve_lab.bench.statistics import median, quantile
from proofserve_lab.chats import Call, ask_all
from proofserve_lab.nodes import BareSpeed, bare_speed, gauges_of, last_seq

# A poll takes milliseconds of a core from the engine: polls 20 ms apart slow a forward by some 5 %.
POLL_S = 0.05
TIMEOUT_S = 120.0
# When the first batch of a round is stored, the node already has the next two in the engine.
WARM_UP_BATCHES = 1
# Bare and round windows alternate; a prefill window, which takes longer to start, is less frequent.
ROUNDS_PER_PREFILL = 2
# The most that a node runs in one call.
MAX_FORWARDS = 1000
# Every model's vocabulary has this many tokens.
TOKEN_IDS = 1000
# A shared machine changes its speed by a third between two windows, and this ratio by some percent.
BUSY_RATIO = 0.95


class StoredResults:
    """Follows the results of the round that runs on ``node``.

    A node stores results batch by batch: a window that begins and ends when a batch is stored holds
    whole batches. This polls ``/results``: ``/status`` answers only at the end of a forward.
    """

    def __init__(self, node: NodeClient, after: int) -> None:
        self._node = node
        # The last result of a batch, and when it was first seen (monotonic clock).
        self.seq, self.at = after, 0.0

    def warm_up(self, batches: int) -> None:
        for _ in range(batches):
            self._next()

    def rate(self, seconds: float) -> float:
        """Results per second of whole batches, from the last one that was seen."""
        seq, at = self.seq, self.at
        while (remaining := at + seconds - time.monotonic()) > 0:
            time.sleep(remaining)
        self.seq = last_seq(self._node, seq)
        self._next()
        return (self.seq - seq) / (self.at - at)

    def _next(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            rows = self._node.results(self.seq)
            if rows:
                # A failed nonce is a result too, and would count as work done.
                for row in rows:
                    if row.error is not None:
                        raise ReportedError(f"nonce {row.nonce} of the round failed: {row.error}")
                self.seq, self.at = rows[-1].seq, time.monotonic()
                return
            if time.monotonic() > deadline:
                raise TooSlowError(f"the round stored nothing for {TIMEOUT_S:g} s")
            time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """``seconds`` of rounds in all, cut into ``windows``; ``busy`` limits ``time_in_forwards``.

    Many short windows: a machine's speed hardly changes between neighbours, and the median ignores
    the pairs in which it did.
    """

    work: AnyWork
    seconds: float
    windows: int
    busy: float

    @property
    def window_s(self) -> float:
        return self.seconds / self.windows


@dataclass(slots=True)
class GenerationReadings:
    """What the windows gave: bare and round in nonces per second, prefill in tokens per second.

    ``beside_prefill`` holds the round window before each prefill window. ``in_forwards`` is the
    fraction of each round window in which the engine ran forwards.
    """

    bare: list[float] = field(default_factory=list)
    round: list[float] = field(default_factory=list)
    in_forwards: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    beside_prefill: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    sequences: int = 0

    def add_bare(self, speed: BareSpeed) -> None:
        self.bare.append(speed.nonces_per_second)
        self.forward_s.append(speed.seconds_per_forward)
        self.sequences = speed.sequences


def bench_generation(node: NodeClient, plan: GenerationPlan, progress: Progress) -> Report:
    """Measure in turns, so that machine drift cancels."""
    readings = GenerationReadings()
    progress.step("warming up")
    # The speed of a first call, which also warms the engine up and is therefore slower.
    first = bare_speed(node, plan.work, 2)
    forwards = min(MAX_FORWARDS, max(2, math.ceil(plan.window_s / first.seconds_per_forward)))
    readings.add_bare(bare_speed(node, plan.work, forwards))
    text = "bare forwards, a round and vLLM's prefill in turns"
    for number in progress.over(text, range(plan.windows)):
        # What a round computes and stores after its first batches.
        results = StoredResults(node, last_seq(node))
        with node.round(plan.work):
            results.warm_up(WARM_UP_BATCHES)
            before, began = gauges_of(node), time.monotonic()
            readings.round.append(results.rate(plan.window_s))
            after, ended = gauges_of(node), time.monotonic()
        readings.in_forwards.append((after.busy_s - before.busy_s) / (ended - began))
        if number % ROUNDS_PER_PREFILL == 0:
            readings.beside_prefill.append(readings.round[-1])
            readings.prefill.append(prefill_speed(node, plan.work, readings.sequences, forwards))
        readings.add_bare(bare_speed(node, plan.work, forwards))
    return report(plan, readings, {**machine(), **node.versions()})


def prefill_speed(node: NodeClient, work: AnyWork, sequences: int, requests: int) -> float:
    """Prompt tokens per second of vLLM alone, which has all ``requests`` to form its steps of."""
    # A new seed each time: no window may find its prompts in the prefix cache.
    draw = np.random.default_rng()
    prompts = draw.integers(0, TOKEN_IDS, (requests, sequences, work.seq_len)).tolist()
    fields = {"model": work.model, "max_tokens": 1, "temperature": 0.0}
    calls = [Call("/v1/completions", {**fields, "prompt": each}) for each in prompts]
    replies = ask_all(node.url, calls, requests)
    if broken := [reply.error for reply in replies if reply.error]:
        raise ReportedError(f"a prefill failed: {broken[0]}")
    began = min(reply.began for reply in replies)
    ended = max(reply.ended for reply in replies)
    return sum(reply.prompt_tokens for reply in replies) / (ended - began)


def report(
    plan: GenerationPlan, readings: GenerationReadings, where: Mapping[str, str | int]
) -> Report:
    work = plan.work
    ratios = ratios_to_neighbours(readings.round, readings.bare)
    windows = {
        "bare_nonces_per_second": readings.bare,
        "round_nonces_per_second": readings.round,
        "busy_ratios": ratios,
        "time_in_forwards": readings.in_forwards,
        "prefill_tokens_per_second": readings.prefill,
    }
    options = {"seconds": plan.seconds, "windows": plan.windows}
    setup = {"protocol": work.protocol, **asdict(work), **options}
    title = f"generation, {work.protocol} protocol"
    return Report(title, _figures(plan, readings, ratios), setup, windows, where)


def _figures(
    plan: GenerationPlan, readings: GenerationReadings, ratios: Sequence[float]
) -> tuple[Figure, ...]:
    tokens = plan.work.seq_len * plan.work.sequences_per_nonce
    beside_prefill = [rate * tokens for rate in readings.beside_prefill]
    forward_s = median(readings.forward_s)
    vs_prefill = [ours / vllm for ours, vllm in zip(beside_prefill, readings.prefill, strict=True)]
    over_prefill, in_forwards = median(vs_prefill), median(readings.in_forwards)
    low, high = quantile(ratios, 0.25), quantile(ratios, 0.75)
    spread = high - low if low is not None and high is not None else math.nan
    return (
        Figure(
            "busy_ratio",
            median(ratios),
            "nonces/s of a round, over the bare forwards before and after it, median",
            Limit(BUSY_RATIO),
        ),
        Figure("busy_ratio_spread", spread, "half of those ratios lie within this range"),
        Figure(
            "time_in_forwards",
            in_forwards,
            "share of a round in which the engine ran forwards, by its own clock, median",
            Limit(plan.busy),
        ),
        Figure(
            "vs_prefill", over_prefill, "proof tokens/s, over vLLM's prefill tokens/s", Limit(1)
        ),
        Figure("nonces_per_second", median(readings.round), "of a round, stored in the outbox"),
        Figure("bare_nonces_per_second", median(readings.bare), "of bare forwards"),
        Figure("proof_tokens_per_second", median(beside_prefill), "of a round"),
        Figure("prefill_tokens_per_second", median(readings.prefill), "of vLLM, proofs stopped"),
        Figure("seconds_per_forward", forward_s, "a bare forward, which does not pause"),
        Figure("sequences_per_forward", readings.sequences, "prompts in one forward"),
    )


def ratios_to_neighbours(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Each value over the mean of the references that were measured before and after it.

    Measured in turns (r v r v ... r), so that a machine that slows down evenly changes no ratio.
    """
    pairs = zip(values, itertools.pairwise(reference), strict=True)
    return [value / ((before + after) / 2) for value, (before, after) in pairs]
