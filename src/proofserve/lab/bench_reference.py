"""How many nonces a second a reference engine recomputes, and what share of the device that is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from proofserve.lab.errors import LabError
from proofserve.lab.figures import Figure
from proofserve.lab.matmul import matmul_rate, seconds_of
from proofserve.lab.report import Report
from proofserve.lab.telling import Progress

# Computes one forward of (seq_len, batch); False if the device has no room for it.
Forward = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured. ``weights`` counts the numbers of all matrices that a token passes."""

    name: str
    weights: int
    device: torch.device
    dtype: torch.dtype
    forward: Forward

    def work(self, seq_len: int) -> float:
        """Multiplications and additions of one nonce, by the weights alone.

        Attention adds 2 * seq_len * heads * head_dim per token and layer, a few percent here.
        """
        return 2.0 * self.weights * seq_len


@dataclass(frozen=True, slots=True)
class Plan:
    """Every combination of ``seq_lens`` (tokens) and ``batches`` (nonces), ``window_s`` each."""

    seq_lens: Sequence[int]
    batches: Sequence[int]
    window_s: float = 2.0


def bench_reference(
    subject: Subject, plan: Plan, where: Mapping[str, str | int], progress: Progress
) -> Report:
    """Measure whole forwards, inputs drawn and vectors finished, and bare multiplications.

    These are measured before and after each length, and the best rate counts. Raises LabError if
    the device has room for no batch at all.
    """
    progress.step("multiplying matrices, and forwards", len(plan.seq_lens) * len(plan.batches))
    rates = [matmul_rate(subject.device, subject.dtype)]
    speeds: dict[int, dict[int, float]] = {}
    for seq_len in plan.seq_lens:
        speeds[seq_len] = _speeds(subject, plan, seq_len, progress)
        rates.append(matmul_rate(subject.device, subject.dtype))
    top = max(rates)
    figures = [Figure("matmul_tflops", top / 1e12, "of bare multiplications, the best seen")]
    for seq_len, by_batch in speeds.items():
        if not by_batch:
            raise LabError(f"there is no memory for a forward of {seq_len} tokens")
        best = max(by_batch, key=by_batch.__getitem__)
        for batch, speed in by_batch.items():
            mark = ", the best" if batch == best else ""
            share = speed * subject.work(seq_len) / top
            figures += [
                Figure(f"nonces_per_second_{seq_len}_{batch}", speed, f"{batch} at a time{mark}"),
                Figure(f"share_{seq_len}_{batch}", share, "of the rate of multiplications"),
            ]
    return Report(
        f"reference engine, {subject.name}",
        tuple(figures),
        _setup(subject, plan),
        {"matmul_flops": rates},
        where,
    )


def _speeds(subject: Subject, plan: Plan, seq_len: int, progress: Progress) -> dict[int, float]:
    """Nonces per second by batch; what the device has no room for is left out."""
    speeds = {}
    for batch in plan.batches:
        if subject.forward(seq_len, batch):
            seconds = seconds_of(
                lambda size=batch: subject.forward(seq_len, size),  # type: ignore[misc]
                subject.device,
                plan.window_s,
            )
            speeds[batch] = batch / seconds
        progress.advance()
    return speeds


def _setup(subject: Subject, plan: Plan) -> dict[str, Any]:
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
