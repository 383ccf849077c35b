"""How fast a device multiplies matrices: the yardstick for whatever does little else."""

import time
from collections.abc import Callable

import torch

SIZES = (512, 1024, 2048, 4096, 8192)
# Seconds of one size, and how long one multiplication may take before larger ones are left out.
WINDOW_S = 0.5


@torch.inference_mode()
def matmul_rate(device: torch.device, dtype: torch.dtype, window_s: float = WINDOW_S) -> float:
    """Multiplications and additions per second of square matrices, at the size that suits best."""
    best = 0.0
    for size in SIZES:
        left = torch.randn(size, size, device=device).to(dtype)
        seconds = seconds_of(lambda x=left: torch.mm(x, x), device, window_s)  # type: ignore[misc]
        best = max(best, 2.0 * size**3 / seconds)
        # The next one takes eight times as long.
        if seconds > window_s / 8:
            break
    return best


def seconds_of(call: Callable[[], object], device: torch.device, window_s: float) -> float:
    """Seconds of one ``call``: the median of at least two, and of as many as ``window_s`` holds.

    One more goes before them, to warm the device up.
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
