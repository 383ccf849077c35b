"""Where the time of one forward goes: drawing inputs, the model, finishing; and which kernels.

The forward is that of the reference engine. The device is waited for at each boundary, so the
three shares add up to 1 and what runs at the same time is not counted twice.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from gpu.report import step_parser, write_record
from proofserve.cli.model import checkpoint_named
from proofserve.engines.reference.engine import Run, proof_values
from proofserve.engines.reference.network import Network, load
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import BlockScheme, LayerOutput
from proofserve.protocol.schemes import scheme

SCHEMES = ("artifact-v1", "distance-v1", "sketch-v1")
BLOCK, KEY = Block("profile", 1), "key"
WARM_UPS = 2
KERNELS = 25
# Of a forward, for inputs and finish together.
MOST_OVERHEAD = 0.05


class TimedBlock(BlockScheme):
    """A scheme on a block that notes the seconds of its inputs and of its finish."""

    def __init__(self, inner: BlockScheme) -> None:
        super().__init__(inner.block, inner.model, inner.device)
        self._inner = inner
        self.reads_every_position = inner.reads_every_position
        self.uses_layer_transforms = inner.uses_layer_transforms
        self.seconds = {"inputs": 0.0, "finish": 0.0}

    def inputs(
        self, public_key: str, nonces: Sequence[int], seq_len: int, dtype: torch.dtype
    ) -> Tensor:
        with self._timed("inputs"):
            return self._inner.inputs(public_key, nonces, seq_len, dtype)

    def layer_transform(self, layer: int, output: LayerOutput) -> LayerOutput:
        return self._inner.layer_transform(layer, output)

    def finish(self, public_key: str, nonces: Sequence[int], states: Tensor) -> Tensor:
        with self._timed("finish"):
            return self._inner.finish(public_key, nonces, states)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = _now(self.device)
        with record_function(part):
            yield
        self.seconds[part] = _now(self.device) - began


def _now(device: torch.device) -> float:
    """The time at which everything asked of ``device`` so far is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def parts_of(network: Network, block: TimedBlock, batch: int, seq_len: int) -> dict[str, float]:
    """Seconds of inputs, model and finish of one forward of ``batch`` nonces."""
    began = _now(network.device)
    proof_values(block, KEY, seq_len, [Run(network, range(batch))], batch)
    whole = _now(network.device) - began
    return {**block.seconds, "model": whole - sum(block.seconds.values())}


def measure(network: Network, name: str, batch: int, seq_len: int, repeats: int) -> dict[str, Any]:
    """Median seconds of each part, its share, and the kernels of one more forward."""
    block = TimedBlock(scheme(name).for_block(BLOCK, network.facts, network.device))
    # sketch-v1 has two sequences a nonce: its forwards are as large as the others'.
    nonces = max(1, batch // scheme(name).sequences_per_nonce)
    runs = [parts_of(network, block, nonces, seq_len) for _ in range(WARM_UPS + repeats)]
    seconds = {part: statistics.median(run[part] for run in runs[WARM_UPS:]) for part in runs[0]}
    whole = sum(seconds.values())
    return {
        "scheme": name,
        "seq_len": seq_len,
        "nonces": nonces,
        "seconds": seconds,
        "shares": {part: value / whole for part, value in seconds.items()},
        "nonces_per_second": nonces / whole,
        "kernels": kernels_of(network, block, nonces, seq_len),
    }


def kernels_of(
    network: Network, block: TimedBlock, batch: int, seq_len: int
) -> list[dict[str, Any]]:
    """The operations that took the device most of its time, by torch's profiler."""
    on_gpu = network.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with profile(activities=activities) as seen:
        proof_values(block, KEY, seq_len, [Run(network, range(batch))], batch)
        _now(network.device)
    events = list(seen.key_averages())
    time_us = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    # Our own marks span the kernels inside them, which are counted already.
    events = [event for event in events if event.key not in block.seconds]
    taken = [(float(getattr(event, time_us)), event) for event in events]
    total = sum(us for us, _ in taken) or 1.0
    largest = sorted(taken, key=lambda each: each[0], reverse=True)[:KERNELS]
    return [
        {"name": event.key[:120], "calls": event.count, "ms": us / 1e3, "share": us / total}
        for us, event in largest
    ]


def figures_of(readings: Sequence[dict[str, Any]]) -> tuple[dict[str, float | None], list[str]]:
    """Figures by scheme and length, and the names of those that exceed the limit."""
    figures: dict[str, float | None] = {}
    beyond = []
    for each in readings:
        end = f"{each['scheme']}_{each['seq_len']}"
        for part, share in each["shares"].items():
            figures[f"share_{part}_{end}"] = share
        overhead = each["shares"]["inputs"] + each["shares"]["finish"]
        figures[f"overhead_{end}"] = overhead
        figures[f"nonces_per_second_{end}"] = each["nonces_per_second"]
        if overhead > MOST_OVERHEAD:
            beyond.append(f"overhead_{end}")
    return figures, beyond


def main() -> None:
    parser = step_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--size", default="0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=128, help="sequences in a forward")
    parser.add_argument("--seq-len", type=int, action="append", required=True)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    found = checkpoint_named(options.model, options.size)
    network = load(found.folder, options.dtype, options.device)
    readings = []
    for name in SCHEMES:
        for seq_len in options.seq_len:
            readings.append(measure(network, name, options.batch, seq_len, options.repeats))
            shares = {part: f"{share:.1%}" for part, share in readings[-1]["shares"].items()}
            print(f"{name}, {seq_len} tokens: {shares}")
    figures, beyond = figures_of(readings)
    setup = {"model": found.name, "device": options.device, "dtype": options.dtype}
    setup |= {"batch": options.batch, "most_overhead": MOST_OVERHEAD}
    windows = {"forwards": readings, "beyond_the_aim": beyond}
    write_record(options.json, figures, setup=setup, windows=windows)


if __name__ == "__main__":
    main()
