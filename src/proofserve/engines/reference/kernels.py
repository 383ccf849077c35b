"""Kernels of other machines, as data: each profile is some lines, and a new one needs no code."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch

from proofserve.engines.reference.arithmetic import KernelProfile, NumberFormat, Point
from proofserve.engines.reference.network import Network

__all__ = ["PROFILES", "KernelProfile", "fp8_kv_profile", "own_profile", "with_kernels"]

# What every kernel rounds whose tensors are kept in 16 bits: what it writes to memory.
_WRITTEN: Final = frozenset(
    {
        *(Point.OPERANDS, Point.OUTPUTS, Point.NORM, Point.HEAD_NORM, Point.TABLE, Point.ROTATED),
        *(Point.ATTENTION, Point.PRODUCT, Point.EXPERTS),
    }
)
# torch rounds what every function returns.
_EAGER: Final = _WRITTEN | {
    *(Point.GAIN, Point.ROTATION, Point.WEIGHTS, Point.ACTIVATION, Point.RESIDUAL)
}
_VLLM_CPU: Final = _WRITTEN | {Point.GAIN, Point.ACTIVATION, Point.STORED_RESIDUAL}


def _bf16(name: str, *points: Point, source: str = "") -> KernelProfile:
    return KernelProfile(name, "bfloat16", frozenset(points), source)


_EAGER_BF16 = KernelProfile("torch eager bfloat16", "bfloat16", _EAGER)
_LIST: Final = (
    _EAGER_BF16,
    KernelProfile("vLLM on a CPU", "bfloat16", _VLLM_CPU),
    KernelProfile("vLLM on a CPU with AMX", "bfloat16", _VLLM_CPU | {Point.WEIGHTS}),
    KernelProfile("compiled", "bfloat16", _WRITTEN | {Point.WEIGHTS, Point.RESIDUAL}),
    KernelProfile("eager attention", "bfloat16", _EAGER | {Point.SCORES}),
    _bf16("outputs", Point.OUTPUTS),
    _bf16("inputs", Point.OPERANDS),
    _bf16("norms", Point.NORM),
    _bf16("norms, gain", Point.NORM, Point.GAIN),
    _bf16("head norms", Point.HEAD_NORM),
    _bf16("head norms, gain", Point.HEAD_NORM, Point.GAIN),
    _bf16("residual", Point.RESIDUAL),
    _bf16("table", Point.TABLE),
    _bf16("weights", Point.WEIGHTS),
    KernelProfile("residual in float32", "bfloat16", _EAGER - {Point.RESIDUAL}),
    *(
        replace(_EAGER_BF16, name=f"partial sums of {n}", partial_sums=n)
        for n in (32, 64, 128, 256)
    ),
    *(replace(_EAGER_BF16, name=f"{n} ranks", ranks=n) for n in (2, 4, 8)),
    KernelProfile("torch eager float16", "float16", _EAGER),
    KernelProfile("TF32", "tf32", frozenset({Point.OPERANDS})),
    KernelProfile("float32", "float32", frozenset(), partial_sums=128),
)
PROFILES: Final[Mapping[str, KernelProfile]] = {each.name: each for each in _LIST}

_OWN: Final[Mapping[torch.dtype, NumberFormat]] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def own_profile(dtype: torch.dtype) -> KernelProfile | None:
    """What transformers does in ``dtype``; None for float32, which needs no emulation."""
    served = _OWN.get(dtype)
    return None if served is None else replace(_EAGER_BF16, name=f"own {served}", format=served)


fp8_kv_profile: Final = replace(_EAGER_BF16, name="fp8 KV", fp8_cache=True)


def with_kernels(network: Network, profile: KernelProfile) -> Network:
    """``network`` as the kernels of ``profile`` compute it; it shares all weights.

    Raises ValueError for a network that is not in float32.
    """
    if network.dtype != torch.float32:
        raise ValueError(f"kernels are emulated in float32, not in {network.dtype}")
    return replace(network, kernels=profile)
