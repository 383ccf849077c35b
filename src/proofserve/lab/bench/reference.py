"""How many nonces per second the reference engine recomputes, and its share of the device."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from proofserve.lab.bench.matmul import Matmul, seconds_of
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.progress import Progress
from proofserve.lab.report.figures import Figure
from proofserve.lab.report.report import Report

# Computes one forward of (seq_len, batch). False: the device has too little memory for it.
Forward = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class ReferenceSubject:
    """What is measured. ``weights`` counts the numbers in all matrices that multiply a token."""

    name: str
    weights: int
    device: torch.device
    dtype: torch.dtype
    forward: Forward

    def work(self, seq_len: int) -> float:
        """Multiplications and additions of one nonce, counting the weights only.

        Attention adds 2 * seq_len * heads * head_dim per token and layer, a few percent here.
        """
        return 2.0 * self.weights * seq_len


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """Every combination of ``seq_lens`` (tokens) and ``batches`` (nonces), ``window_s`` each."""

    seq_lens: Sequence[int]
    batches: Sequence[int]
    window_s: float = 2.0


@dataclass(frozen=True, slots=True)
class ReferenceReading:
    """One combination: nonces per second, and the share of the bare multiplication speed."""

    seq_len: int
    batch: int
    speed: float
    share: float


def bench_reference(
    subject: ReferenceSubject,
    plan: ReferencePlan,
    where: Mapping[str, str | int],
    progress: Progress,
) -> Report:
    """Measure whole forwards (with inputs and finished vectors) and bare multiplications.

    Bare multiplications run before and after every combination, so that a device whose speed
    changes does not change the share. Raises LabError if no batch of a length fits into memory.
    """
    progress.step("forwards, and bare multiplications", len(plan.seq_lens) * len(plan.batches))
    matmul = Matmul(subject.device, subject.dtype)
    rates, readings = [matmul.rate()], []
    for seq_len, batch in itertools.product(plan.seq_lens, plan.batches):
        if subject.forward(seq_len, batch):
            forward = partial(subject.forward, seq_len, batch)
            speed = batch / seconds_of(forward, subject.device, plan.window_s)
            rates.append(matmul.rate())
            share = speed * subject.work(seq_len) / (sum(rates[-2:]) / 2)
            readings.append(ReferenceReading(seq_len, batch, speed, share))
        progress.advance()
    top = Figure("matmul_tflops", max(rates) / 1e12, "of bare multiplications, the best window")
    lengths = [_of_length(seq_len, readings) for seq_len in plan.seq_lens]
    return Report(
        f"reference engine, {subject.name}",
        (top, *itertools.chain.from_iterable(lengths)),
        _setup(subject, plan),
        {"matmul_flops": rates},
        where,
    )


def _of_length(seq_len: int, readings: Sequence[ReferenceReading]) -> list[Figure]:
    found = [reading for reading in readings if reading.seq_len == seq_len]
    if not found:
        raise LabError(f"there is no memory for a forward of {seq_len} tokens")
    best = max(found, key=lambda reading: reading.speed)
    figures = []
    for each in found:
        name, mark = f"{seq_len}_{each.batch}", ", the best" if each is best else ""
        figures += [
            Figure(f"nonces_per_second_{name}", each.speed, f"{each.batch} at a time{mark}"),
            Figure(f"share_{name}", each.share, "of the bare multiplications before and after it"),
        ]
    return figures


def _setup(subject: ReferenceSubject, plan: ReferencePlan) -> dict[str, Any]:
    on_gpu = subject.device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(subject.device) if on_gpu else None,
        "model": subject.name,
        "weights": subject.weights,
        "device": str(subject.device),
        "dtype": str(subject.dtype).removeprefix("torch."),
        "seq_lens": list(plan.seq_lens),
        "batches": list(plan.batches),
        "window_s": plan.window_s,
    }
