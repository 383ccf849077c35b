"""How many nonces per second the reference engine recomputes, and its share of the device."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from proofserve.lab.report import Figure, LabError, Progress, Report

SIZES = (512, 1024, 2048, 4096, 8192)
# Seconds per size; sizes whose single multiplication would take longer are left out.
WINDOW_S = 0.5
# Computes one forward of (seq_len, batch). False: the device has too little memory for it.
Forward = Callable[[int, int], bool]


class Matmul:
    """Multiplies square matrices of the size at which the device is fastest."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, window_s: float = WINDOW_S
    ) -> None:
        self._device, self._dtype, self._window_s = device, dtype, window_s
        self._size, best = SIZES[0], 0.0
        for size in SIZES:
            rate = self._rate(size)
            if rate > best:
                self._size, best = size, rate
            # The next one takes eight times as long.
            if 8 * 2.0 * size**3 / rate > window_s:
                break

    def rate(self) -> float:
        return self._rate(self._size)

    @torch.inference_mode()
    def _rate(self, size: int) -> float:
        matrix = torch.randn(size, size, device=self._device).to(self._dtype)

        def multiply() -> None:
            torch.mm(matrix, matrix)

        return 2.0 * size**3 / seconds_of(multiply, self._device, self._window_s)


def seconds_of(call: Callable[[], object], device: torch.device, window_s: float) -> float:
    """Median seconds of one ``call``, of as many as fit into ``window_s`` and at least two.

    One more call goes first and warms the device up.
    """
    taken: list[float] = []
    until = float("inf")
    while len(taken) < 3 or time.perf_counter() < until:
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        if not taken:
            until = ended + window_s
        taken.append(ended - began)
    return float(torch.tensor(taken[1:], dtype=torch.float64).median())


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
