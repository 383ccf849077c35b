"""How much of the engine's speed a round keeps, and how that compares with vLLM's own prefill."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from proofserve.lab.bench.result_rate import StoredResults
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.load import Call, closed_loop, rate_of_completions
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.progress import Progress
from proofserve.lab.client.records import AnyWork, BareSpeed
from proofserve.lab.client.waiting import wait_until
from proofserve.lab.report.figures import Figure, Limit, median, ratio_to_neighbours
from proofserve.lab.report.machine import machine
from proofserve.lab.report.report import Report

# Enough that vLLM always has the next step's prompts at hand while answers are on their way.
REQUESTS_IN_FLIGHT = 4
FIRST_PREFILLS_S = 120.0
WARM_UP_BATCHES = 2
# As many as a node runs in one call.
MAX_FORWARDS = 1000
# Every vocabulary has this many tokens.
TOKEN_IDS = 1000


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """``seconds`` of each kind of work, cut into ``windows``; ``busy`` limits ``busy_ratio``."""

    work: AnyWork
    seconds: float = 20.0
    windows: int = 5
    busy: float = 0.95

    @property
    def window_s(self) -> float:
        """Seconds of one window."""
        return self.seconds / self.windows


@dataclass(slots=True)
class GenerationReadings:
    """What the windows gave: bare and round in nonces per second, prefill in tokens per second."""

    bare: list[float] = field(default_factory=list)
    round: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    sequences: int = 0

    def add_bare(self, speed: BareSpeed) -> None:
        """Note a window of bare forwards."""
        self.bare.append(speed.nonces_per_second)
        self.forward_s.append(speed.seconds_per_forward)
        self.sequences = speed.sequences


def bench_generation(node: NodeClient, plan: GenerationPlan, progress: Progress) -> Report:
    """Measure in turns (bare, round, prefill, bare, ...), so that drift of the machine cancels."""
    readings = GenerationReadings()
    progress.step("warming up")
    forwards = _forwards_per_window(node, plan)
    progress.step(f"{plan.windows} x (round, vLLM's prefill, bare forwards)", plan.windows)
    readings.add_bare(node.measure(plan.work, forwards))
    for _ in range(plan.windows):
        readings.round.append(round_speed(node, plan))
        readings.prefill.append(prefill_speed(node, plan, readings.sequences))
        readings.add_bare(node.measure(plan.work, forwards))
        progress.advance()
    return report(plan, readings, {**machine(), **node.versions()})


def round_speed(node: NodeClient, plan: GenerationPlan) -> float:
    """Nonces per second that a round computes and stores, once it has got going."""
    results = StoredResults(node, node.last_seq())
    with node.round(plan.work):
        return results.rate(results.warm_up(WARM_UP_BATCHES), plan.window_s)


def prefill_speed(node: NodeClient, plan: GenerationPlan, sequences: int) -> float:
    """Prompt tokens per second of vLLM alone, on prompts of the same number and length."""
    work = plan.work
    # A new seed each time: what a window computed must not be in the next one's prefix cache.
    draw = np.random.default_rng()

    def call(_number: int) -> Call:
        prompts = draw.integers(0, TOKEN_IDS, (sequences, work.seq_len)).tolist()
        body = {"model": work.model, "prompt": prompts, "max_tokens": 1, "temperature": 0.0}
        return Call("/v1/completions", body)

    with closed_loop(node.url, call, REQUESTS_IN_FLIGHT) as loop:
        wait_until(lambda: len(loop.replies) >= REQUESTS_IN_FLIGHT, "prefills", FIRST_PREFILLS_S)
        time.sleep(plan.window_s)
        until = time.monotonic()
    if broken := [reply.error for reply in loop.replies if reply.error]:
        raise LabError(f"a prefill failed: {broken[0]}")
    return rate_of_completions(
        loop.replies, REQUESTS_IN_FLIGHT, until, lambda reply: reply.prompt_tokens
    )


def report(
    plan: GenerationPlan, readings: GenerationReadings, where: Mapping[str, str | int]
) -> Report:
    """The figures of the windows."""
    work = plan.work
    proof_tokens = [rate * work.seq_len for rate in readings.round]
    figures = (
        Figure(
            "busy_ratio",
            ratio_to_neighbours(readings.round, readings.bare),
            "nonces/s of a round, over bare forwards back to back",
            Limit(plan.busy),
        ),
        Figure(
            "vs_prefill",
            median(_ratios(proof_tokens, readings.prefill)),
            "proof tokens/s, over vLLM's own prefill tokens/s",
            Limit(1.0),
        ),
        Figure("nonces_per_second", median(readings.round), "of a round, stored in the outbox"),
        Figure("bare_nonces_per_second", median(readings.bare), "of bare forwards"),
        Figure("proof_tokens_per_second", median(proof_tokens), "of a round"),
        Figure("prefill_tokens_per_second", median(readings.prefill), "of vLLM, proofs stopped"),
        Figure("seconds_per_forward", median(readings.forward_s), "chat waits no longer than this"),
        Figure("sequences_per_forward", readings.sequences, "nonces in one forward"),
    )
    windows = {
        "bare_nonces_per_second": readings.bare,
        "round_nonces_per_second": readings.round,
        "prefill_tokens_per_second": readings.prefill,
    }
    setup = {
        "protocol": work.protocol,
        **asdict(work),
        "seconds": plan.seconds,
        "windows": plan.windows,
    }
    return Report(f"generation, {work.protocol} protocol", figures, setup, windows, where)


def _ratios(values: Sequence[float], yardstick: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, yardstick, strict=True)]


def _forwards_per_window(node: NodeClient, plan: GenerationPlan) -> int:
    """The first call also warms the engine up, so its speed is a guess on the low side."""
    speed = node.measure(plan.work, 2)
    return min(MAX_FORWARDS, max(2, math.ceil(plan.window_s / speed.seconds_per_forward)))
