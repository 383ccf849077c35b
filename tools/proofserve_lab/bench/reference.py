"""How many nonces per second the reference engine recomputes, and its share of the device."""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.network import Network
from proofserve.host import machine
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import ArtifactScheme
from proofserve.reports import Figure, Progress, Report, ReportedError
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import Workload

SIZES = (512, 1024, 2048, 4096, 8192)
# Seconds per size; sizes whose single multiplication would take longer are left out.
WINDOW_S = 0.5


def fastest_size(device: torch.device, dtype: torch.dtype) -> int:
    fastest, best = SIZES[0], 0.0
    for size in SIZES:
        rate = multiply_rate(size, device, dtype)
        if rate > best:
            fastest, best = size, rate
        # The next one takes eight times as long.
        if 8 * 2.0 * size**3 / rate > WINDOW_S:
            break
    return fastest


@torch.inference_mode()
def multiply_rate(
    size: int, device: torch.device, dtype: torch.dtype, window_s: float = WINDOW_S
) -> float:
    """Operations per second of products of square matrices."""
    matrix = torch.randn(size, size, device=device).to(dtype)
    return 2.0 * size**3 / seconds_of(partial(torch.mm, matrix, matrix), device, window_s)


def seconds_of(call: Callable[[], object], device: torch.device, window_s: float) -> float:
    """Median seconds of one ``call``, of at least two within ``window_s``, after one to warm up."""
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


def forward(network: Network, seq_len: int, batch: int) -> bool:
    """Compute one forward. False: the device has too little memory for it. Raises EngineFault."""
    work = Workload(ArtifactScheme(), Block("block", 1), "key", seq_len)
    try:
        ReferenceEngine(batch).compute(work, network, range(batch))
    except EngineFault as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            return False
        raise
    return True


def bench_reference(
    name: str,
    network: Network,
    seq_lens: Sequence[int],
    batches: Sequence[int],
    window_s: float,
    progress: Progress,
) -> Report:
    """Measure whole forwards (with inputs and finished vectors) and bare multiplications.

    Every combination of ``seq_lens`` (tokens) and ``batches`` (nonces) for ``window_s``, with bare
    multiplications before and after. Raises ReportedError if no batch of a length fits into memory.
    """
    device, dtype = network.device, network.dtype
    size = fastest_size(device, dtype)
    rates = [multiply_rate(size, device, dtype)]
    # By length: batch, nonces per second, and the share of the bare multiplications' speed.
    readings: dict[int, list[tuple[int, float, float]]] = {each: [] for each in seq_lens}
    pairs = [*itertools.product(seq_lens, batches)]
    for seq_len, batch in progress.over("forwards, and bare multiplications", pairs):
        if forward(network, seq_len, batch):
            speed = batch / seconds_of(partial(forward, network, seq_len, batch), device, window_s)
            rates.append(multiply_rate(size, device, dtype))
            # Multiplications and additions of one nonce, counting the weights only: attention adds
            # 2 * seq_len * heads * head_dim per token and layer, a few percent here.
            work = 2.0 * network.weights * seq_len
            share = speed * work / (sum(rates[-2:]) / 2)
            readings[seq_len].append((batch, speed, share))
    top = Figure("matmul_tflops", max(rates) / 1e12, "of bare multiplications, the best window")
    lengths = [_of_length(seq_len, readings[seq_len]) for seq_len in seq_lens]
    on_gpu = device.type == "cuda"
    setup = {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "model": name,
        "weights": network.weights,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "seq_lens": list(seq_lens),
        "batches": list(batches),
        "window_s": window_s,
    }
    title, figures = f"reference engine, {name}", itertools.chain.from_iterable(lengths)
    return Report(title, (top, *figures), setup, {"matmul_flops": rates}, machine())


def _of_length(seq_len: int, readings: Sequence[tuple[int, float, float]]) -> list[Figure]:
    if not readings:
        raise ReportedError(f"there is no memory for a forward of {seq_len} tokens")
    best = max(speed for _, speed, _ in readings)
    figures = []
    for batch, speed, share in readings:
        name, mark = f"{seq_len}_{batch}", ", the best" if speed == best else ""
        figures += [
            Figure(f"nonces_per_second_{name}", speed, f"{batch} at a time{mark}"),
            Figure(f"share_{name}", share, "of the bare multiplications before and after it"),
        ]
    return figures
