"""How fast a device multiplies matrices, to compare with programs that do little else."""

import time
from collections.abc import Callable

import torch

SIZES = (512, 1024, 2048, 4096, 8192)
# Seconds per size; sizes whose single multiplication would take longer are left out.
WINDOW_S = 0.5


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
