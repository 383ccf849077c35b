"""Kernels of other machines, as data: each profile is some lines, and a new one needs no code.

What a profile rounds is what some kernel rounds, by its source where a comment names it; nothing is
fitted to vectors of any machine.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch

from proofserve.engines.reference.arithmetic import KernelProfile, Point
from proofserve.engines.reference.network import DeclaredInputs, Network
from proofserve.engines.reference.rounding import Scaling

__all__ = ["PROFILES", "SERVED", "KernelProfile", "Point", "own_profile", "with_kernels"]

# What is written to memory, and so rounded, by every kernel whose tensors have 16 bits.
_WRITTEN: Final = frozenset(
    {
        *(Point.OPERANDS, Point.OUTPUTS, Point.NORM, Point.HEAD_NORM, Point.TABLE, Point.ROTATED),
        *(Point.ATTENTION, Point.PRODUCT, Point.EXPERT_PRODUCT, Point.MIXTURE),
    }
)
# torch rounds what every function returns.
_EAGER: Final = _WRITTEN | {
    *(Point.GAIN, Point.ROTATION, Point.PAIR_ROTATION, Point.SCORES, Point.WEIGHTS),
    *(Point.FLOAT_ROUTER, Point.ACTIVATION, Point.EXPERT_STEPS, Point.RESIDUAL),
}
# Neighbours are rotated by torch, because proofserve refuses vLLM's own kernel for that on
# processors (engines.vllm.support).
_VLLM_CPU: Final = _WRITTEN | {
    *(Point.VLLM_GAIN, Point.PAIR_ROTATION, Point.ACTIVATION, Point.STORED_RESIDUAL)
}
# Into a cache in fp8 csrc/cpu/cpu_attn.cpp writes the next number towards zero.
_CUT_CACHE: Final = frozenset({Point.CACHE})

# transformers op by op: each torch function rounds its result and accumulates in float32 (oneDNN,
# and torch's own products where oneDNN has no bfloat16); flash attention on CPUs rounds its weights
# (aten FlashAttentionKernel.cpp).
_TORCH = KernelProfile("torch", _EAGER)

_LIST: Final = (
    _TORCH,
    replace(_TORCH, name="torch in float16", format="float16"),
    # vLLM csrc/cpu: without AVX512_BF16 cpu_types_x86.hpp cuts off the lower bits of what these
    # write: rotary embedding (pos_encoding), attention (cpu_attn_vec, weights in float32), experts
    # (cpu_fused_moe). Norms by ir/ops/layernorm.py, which reads the exact sum and stores the
    # rounded one. SiLU and product by torch. Integers by dnnl_kernels.cpp.
    KernelProfile(
        "vLLM on x86 without bfloat16",
        _VLLM_CPU,
        truncated=frozenset({Point.ROTATED, Point.ATTENTION, Point.EXPERT_PRODUCT, Point.MIXTURE})
        | _CUT_CACHE,
        scaling="inverse",
    ),
    # The same, written with vcvtneps2bf16, which takes the nearest.
    KernelProfile("vLLM on x86 with bfloat16", _VLLM_CPU, truncated=_CUT_CACHE, scaling="inverse"),
    # The same with cpu_attn_amx.hpp, whose tiles read weights in bfloat16, and integers nearly as
    # sgl-kernels make them.
    KernelProfile(
        "vLLM on x86 with AMX", _VLLM_CPU | {Point.WEIGHTS}, truncated=_CUT_CACHE, scaling="largest"
    ),
    # vLLM csrc: layernorm_kernels.cu rounds the sum and before the gain, pos_encoding_kernels.cu
    # and activation_kernels.cu once per output; FlashAttention rounds its weights; tensor cores
    # accumulate in float32; integers by scaled_quant.cu.
    KernelProfile(
        "vLLM on a GPU",
        _EAGER - {Point.ROTATION, Point.PAIR_ROTATION, Point.SCORES, Point.FLOAT_ROUTER}
        | {Point.VLLM_GAIN},
        scaling="largest",
    ),
    # torch inductor keeps float32 within a fused kernel (emulate_precision_casts is off), so of
    # vLLM's ir/ops/layernorm.py and SiLU only results are rounded.
    KernelProfile(
        "compiled", _WRITTEN | {Point.WEIGHTS, Point.EXPERT_STEPS, Point.STORED_RESIDUAL}
    ),
    replace(_TORCH, name="residual in float32", points=_EAGER - {Point.RESIDUAL}),
    KernelProfile("outputs of matrices", frozenset({Point.OUTPUTS, Point.EXPERT_STEPS})),
    KernelProfile("inputs of matrices", frozenset({Point.OPERANDS})),
    KernelProfile("norms", frozenset({Point.NORM, Point.GAIN})),
    KernelProfile("queries and keys", frozenset({Point.HEAD_NORM, Point.GAIN, Point.ROTATED})),
    # Running sums in 16 bits are the coarsest that a product may be: torch lets cuBLAS add up the
    # parts of split-K so (allow_bf16_reduced_precision_reduction), with longer chunks than these.
    *(
        replace(_TORCH, name=f"sums of {size} in bfloat16", partial_sums=size)
        for size in (32, 64, 128, 256)
    ),
    # Tensor parallelism: each rank's product in bfloat16, all-reduced in bfloat16.
    *(replace(_TORCH, name=f"torch on {ranks} ranks", ranks=ranks) for ranks in (2, 4, 8)),
    # Tensor cores read float32 operands with 10 bits of fraction.
    KernelProfile("TF32", frozenset({Point.OPERANDS}), format="tf32"),
    # Another order of summation is all that differs between float32 kernels.
    KernelProfile("float32", frozenset(), format="float32", partial_sums=64),
)

PROFILES: Final[Mapping[str, KernelProfile]] = {each.name: each for each in _LIST}
"""Every honest kernel that a served network may have, by name; a cache in fp8 is not among them."""

SERVED: Final = (
    *("vLLM on x86 with bfloat16", "vLLM on x86 with AMX", "vLLM on x86 without bfloat16"),
    *("vLLM on a GPU", "compiled"),
)
"""Those of ``PROFILES`` that emulate all that some server rounds."""


def own_profile(dtype: torch.dtype) -> KernelProfile | None:
    """What transformers does in ``dtype``, on any machine; None for float32: no emulation."""
    if dtype == torch.float16:
        return replace(_TORCH, format="float16")
    return _TORCH if dtype == torch.bfloat16 else None


def with_kernels(network: Network, profile: KernelProfile | None) -> Network:
    """``network`` as kernels of ``profile`` compute it; it shares all weights.

    None gives this machine's kernels back. Raises ValueError for a network that is not in float32.
    """
    if network.dtype != torch.float32:
        raise ValueError(f"kernels are emulated in float32, not in {network.dtype}")
    scaling: Scaling = "division" if profile is None else profile.scaling
    changes = tuple(
        replace(each, scaling=scaling) if isinstance(each, DeclaredInputs) else each
        for each in network.changes
    )
    return replace(network, kernels=profile, changes=changes)
