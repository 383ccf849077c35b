"""The kernels on a CPU, by Triton's interpreter, beside torch: prints what was found as JSON.

Triton reads TRITON_INTERPRET once, when it is imported, so this runs in a process of its own.
"""

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from proofserve.protocol import draws, network_schemes
from proofserve.protocol.device import kernels
from proofserve.protocol.draws import seed_bits
from tests.golden import replay_artifact, replay_common, replay_distance
from tests.golden.cases import GOLDEN_DIR, load

# The interpreter's conversions to bfloat16 cut digits off. Compiled ones round, as the test of the
# compiled code shows.
convert = InterpreterBuilder.cast_impl
CPU = torch.device("cpu")
# The first hash of 1520976789 rounds to 1.0, that of 2271226130 is 0, and with four numbers the
# first of 4003389761 is 0.
SEEDS = [0, 1, 2**31, 2**32 - 1, 1520976789, 2271226130, 3444677179, 4003389761]
SIZES = [1, 2, 3, 16, 31, 2047, 2048, 2049, 20_003]
LOWER = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Others draw millions of numbers for a projection, which takes the interpreter minutes.
FILES = (
    "murmur3", "normal", "inputs", "householder_vector", "signs", "target", "haar", "pick",
    "pipeline_b",
)  # fmt: skip
REPLAYS = replay_common.REPLAYS | replay_distance.REPLAYS | replay_artifact.REPLAYS


def rounded(builder: InterpreterBuilder, source: TensorHandle, target: Any) -> TensorHandle:
    if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
        return convert(builder, source, target)
    words = torch.from_numpy(source.data).to(torch.bfloat16).view(torch.uint16)
    return TensorHandle(words.numpy(), tl.bfloat16)


def drawn(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """N(seed, n) of every seed by the kernel, as a view that is not contiguous."""
    canvas = torch.full((len(SEEDS), 2 * n + 6), 9.0, dtype=dtype)
    kernels.fill_normal(canvas[:, 3:-3:2], seed_bits(SEEDS, CPU))
    assert canvas[:, :3].eq(9).all()
    assert canvas[:, -3:].eq(9).all()
    assert canvas[:, 4:-3:2].eq(9).all()
    return canvas[:, 3:-3:2]


def farthest_normal() -> float:
    apart = [(drawn(n) - draws.normal(SEEDS, n, CPU)).abs().max().item() for n in SIZES]
    return max(apart)


def not_rounded_once() -> list[str]:
    """The dtypes in which a number is not the float32 one, rounded to nearest even."""
    return [
        name
        for dtype, name in LOWER.items()
        if not torch.equal(drawn(2049, dtype), drawn(2049).to(dtype))
    ]


def differing_hashes() -> int:
    keys = torch.cat((torch.tensor([-(2**31), -7, -1, 2**31 - 1]), torch.arange(1500))).int()
    seeds = seed_bits(SEEDS, CPU)
    return int((kernels.hash_keys(seeds, keys) != draws.hash_keys(seeds, keys)).sum())


def farthest_rotation() -> float:
    made = torch.Generator().manual_seed(1)
    apart = []
    for dim, count in ((12, 11), (1, 3), (300, 8), (1024, 8)):
        x = torch.randn(5, dim, generator=made)
        steps = torch.randn(5, count, dim, generator=made)
        steps /= steps.norm(dim=2, keepdim=True)
        wanted = network_schemes.rotate(x / x.norm(dim=1, keepdim=True), steps)
        found = kernels.rotate(x / x.norm(dim=1, keepdim=True), steps)
        apart.append((found - wanted).abs().max().item())
    return max(apart)


def broken_rows_stay_broken() -> bool:
    x = torch.ones(3, 12)
    x[1, 4] = torch.nan
    found = kernels.rotate(x, draws.unit_vectors(range(33), 12, CPU).view(3, 11, 12))
    return found.isfinite().all(dim=1).tolist() == [True, False, True]


class Counted:
    """The kernels, and how often each ran."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        self.calls[name] += 1
        return getattr(kernels, name)(*arguments)


def golden() -> dict[str, int]:
    """Replay the golden cases with the kernels in torch's place; how often each kernel ran."""
    counted = Counted()
    for module in (draws, network_schemes):
        module.kernels_for = lambda _device: counted
    cases = [case for case in load(GOLDEN_DIR) if case.file.removesuffix(".json") in FILES]
    for case in cases:
        REPLAYS[case.file](case)
    return {"cases": len(cases), **counted.calls}


if __name__ == "__main__":
    InterpreterBuilder.cast_impl = rounded
    found = {
        "differing hashes": differing_hashes(),
        "farthest normal": farthest_normal(),
        "not rounded once": not_rounded_once(),
        "farthest rotation": farthest_rotation(),
        "broken rows stay broken": broken_rows_stay_broken(),
        "no rows": list(kernels.hash_keys(seed_bits([], CPU), torch.arange(5).int()).shape),
    }
    print(json.dumps({**found, "golden": golden()}))
