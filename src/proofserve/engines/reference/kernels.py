"""Kernels of other machines: where each rounds, as data, and the arithmetic of such a profile.

All is computed in float32, and rounded where a kernel of less precision rounds. What a profile
rounds is what some kernel rounds, by its source where a comment names it; nothing is fitted to
vectors of any machine, and a new profile needs no code.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from proofserve.engines.reference.rounding import Rounding, Scaling, fp8_unscaled

NumberFormat = Literal["bfloat16", "float16", "tf32", "float32"]


class Point(StrEnum):
    """A place of a decoder where a kernel may round."""

    OPERANDS = "both operands of a matrix, and queries, keys and values"
    OUTPUTS = "what a matrix gives"
    OUTPUTS_OF_EIGHT_BITS = "what a matrix gives whose operands have 8 bits"
    NORM = "what a norm of the residual stream gives"
    HEAD_NORM = "what a norm within attention gives: of queries and keys, or of MLA's latents"
    GAIN = "normalised values before the gain, where the model's own code rounds them"
    VLLM_GAIN = "normalised values before every gain: vLLM has one norm for all families but Gemma"
    TABLE = "cosines and sines of the positions"
    ROTATION = "each product of the rotary embedding"
    PAIR_ROTATION = "each product of a rotary embedding of neighbours, as DeepSeek has it"
    ROTATED = "queries and keys after the rotary embedding"
    SCORES = "queries times keys, where a model writes attention as plain products"
    WEIGHTS = "the attention's weights, before they multiply the values"
    ATTENTION = "what attention gives"
    FLOAT_ROUTER = "what a router gives that vLLM computes in float32, as MiniMax's"
    ACTIVATION = "SiLU or GELU"
    PRODUCT = "the activation times the other half of the MLP"
    EXPERT_STEPS = "in an expert: what matrices and activation give, and the weighted output"
    EXPERT_PRODUCT = "in an expert: the activation times the other half"
    MIXTURE = "the sum of the experts' outputs"
    REDUCED = "the sum of what all ranks have"
    RESIDUAL = "the residual stream after each addition"
    STORED_RESIDUAL = "the residual stream as stored, while the next norm reads the exact sum"
    CACHE = "keys and values in a cache in fp8"


def _tf32(values: Tensor) -> Tensor:
    """The nearest numbers with 10 bits of fraction, ties to even."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


_ROUNDINGS: Final[Mapping[NumberFormat, Rounding]] = {
    "bfloat16": lambda values: values.to(torch.bfloat16).float(),
    "float16": lambda values: values.to(torch.float16).float(),
    "tf32": _tf32,
    "float32": lambda values: values,
}


def _exact_sum(inputs: Tensor, weight: Tensor) -> Tensor:
    """As kernels add up integers. On a card, where float64 may be slow, as it adds up float32."""
    if inputs.device.type != "cpu":
        return functional.linear(inputs, weight)
    return functional.linear(inputs.double(), weight.double()).float()


# So many running sums stay in the cache of a processor, where each is read once for every chunk.
_RUNNING: Final = 2**19


# Its fraction, of 2^64.
_GOLDEN_RATIO = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """Where one set of kernels rounds, and to what; all else is float32. It changes no tensor.

    At ``truncated`` points the lower bits are cut off, elsewhere values become the nearest.
    ``partial_sums``: a matrix adds up its inputs in chunks of so many, and keeps the running sum in
    ``format``. ``ranks``: so many devices each add up a part of the inputs of the matrices that
    tensor parallelism splits; the parts are rounded, and added up at once, or ``by_gloo`` one after
    the other. ``fp8_cache``: attention reads keys and values from a cache in fp8. ``order``: a
    matrix, and each product of attention, adds up in two parts, cut where this number says; None
    leaves it to this machine. ``scaling``: how inputs become integers, where a checkpoint declares
    these.
    """

    name: str
    points: frozenset[Point]
    format: NumberFormat = "bfloat16"
    truncated: frozenset[Point] = frozenset()
    partial_sums: int | None = None
    ranks: int = 1
    by_gloo: bool = False
    fp8_cache: bool = False
    order: int | None = None
    scaling: Scaling = "division"

    def _round(self, values: Tensor) -> Tensor:
        return _ROUNDINGS[self.format](values)

    def at(self, point: Point, values: Tensor) -> Tensor:
        """``values``, rounded if the profile rounds at ``point``."""
        if point not in self.points:
            return values
        if point in self.truncated:
            # bfloat16 without its lower bits: the next number towards zero.
            return (values.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)
        return self._round(values)

    def as_served(self, values: Tensor) -> Tensor:
        """``values`` in the format that a node serves; TF32 is only what matrices read."""
        served = self.format in {"bfloat16", "float16"}
        return self._round(values) if served else values

    def product(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        split: bool = False,
        as_they_are: bool = False,
    ) -> Tensor:
        """``inputs`` [..., in] times ``weight`` [out, in]; ``split`` if each rank has a part.

        Operands ``as_they_are`` are integers or fp8 times their scales, which no kernel rounds.
        """
        if as_they_are:
            adds_up: Callable[[Tensor, Tensor], Tensor] = _exact_sum
        else:
            adds_up = self._sum
            inputs, weight = self.at(Point.OPERANDS, inputs), self.at(Point.OPERANDS, weight)
        ranks = self.ranks if split else 1
        each = zip(inputs.tensor_split(ranks, -1), weight.tensor_split(ranks, -1), strict=True)
        parts = (adds_up(a, b) for a, b in each)
        # The first rank has the bias.
        first = next(parts) if bias is None else next(parts) + bias
        return self.all_reduced(chain([first], parts)) if ranks > 1 else first

    def _sum(self, inputs: Tensor, weight: Tensor) -> Tensor:
        size, order = self.partial_sums, self.order
        if size is None and order is None:
            return functional.linear(inputs, weight)
        if size is None:
            return self.matmul(inputs, weight.mT)
        weights = torch.split(weight, size, -1)

        def added(rows: Tensor) -> Tensor:
            chunks = zip(torch.split(rows, size, -1), weights, strict=True)
            return self._added(functional.linear(a, b) for a, b in chunks)

        if inputs.device.type != "cpu":
            return added(inputs)
        rows = inputs.flatten(0, -2)
        made = [added(few) for few in torch.split(rows, max(1, _RUNNING // len(weight)))]
        return torch.cat(made).view(*inputs.shape[:-1], len(weight))

    def matmul(self, one: Tensor, other: Tensor) -> Tensor:
        """``one`` [..., n, in] times ``other`` [..., in, m], added up in the profile's order."""
        if self.order is None:
            return one @ other
        # Orders that follow each other cut every product 0.38 of the way apart, round the end.
        cut = 1 + (self.order * _GOLDEN_RATIO % 2**64 * (one.shape[-1] - 1) >> 64)
        return one[..., :cut] @ other[..., :cut, :] + one[..., cut:] @ other[..., cut:, :]

    def all_reduced(self, parts: Iterable[Tensor]) -> Tensor:
        """The sum of the ranks' ``parts``, which they send rounded, and add up in float32.

        So do vLLM's own kernels on a processor (shm.cpp) and among up to 8 cards of a host
        (custom_all_reduce.cuh). PyTorch's gloo rounds each sum.
        """
        if self.by_gloo:
            return self._added(parts)
        return self.at(Point.REDUCED, sum(map(self._round, parts), torch.zeros(())))

    def _added(self, parts: Iterable[Tensor]) -> Tensor:
        # One at a time: all parts of a wide matrix together take more memory than a layer.
        rounded = map(self._round, parts)
        total = next(rounded)
        for part in rounded:
            total = self._round(total + part)
        return total

    def cached(self, keys_or_values: Tensor) -> Tensor:
        """Keys or values as attention reads them."""
        stored = self.at(Point.OPERANDS, keys_or_values)
        if not self.fp8_cache:
            return stored
        return fp8_unscaled(stored, cut=Point.CACHE in self.truncated)

    def attention(
        self, func: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """``func`` with the signature of scaled_dot_product_attention: [n, heads, seq_len, d]."""
        query, key, value = self.at(Point.OPERANDS, query), self.cached(key), self.cached(value)
        if Point.WEIGHTS not in self.points and self.order is None:
            return self.at(Point.ATTENTION, func(query, key, value, **options))
        mask = options.pop("attn_mask", None)
        masks = [None] * len(query) if mask is None else mask.expand(len(query), -1, -1, -1)
        # One sequence at a time: the scores of many long ones would not fit into memory.
        rows = zip(query, key, value, masks, strict=True)
        return torch.stack([self._attended(*row, **options) for row in rows])

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Attention of one sequence [heads, seq_len, d].

        Weights are rounded before they are normalised, and divided by the sum of the exact ones:
        so do FlashAttention on GPUs and torch's on CPUs (``aten/native/cpu/FlashAttentionKernel``).
        """
        groups = len(query) // len(key)
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        scale = options.get("scale") or query.shape[-1] ** -0.5
        scores = self.matmul(query, key.mT) * scale
        if options.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        attended = self.matmul(self.at(Point.WEIGHTS, weights), value)
        return self.at(Point.ATTENTION, attended / weights.sum(-1, keepdim=True))


# What is written to memory, and so rounded, by every kernel whose tensors have 16 bits.
_WRITTEN: Final = frozenset(
    {
        *(Point.OPERANDS, Point.OUTPUTS, Point.OUTPUTS_OF_EIGHT_BITS, Point.NORM, Point.HEAD_NORM),
        *(Point.TABLE, Point.ROTATED),
        *(Point.ATTENTION, Point.PRODUCT, Point.EXPERT_PRODUCT, Point.MIXTURE, Point.REDUCED),
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
    # (cpu_fused_moe), sums over ranks (shm), products of integers (dnnl_kernels). Norms by
    # ir/ops/layernorm.py, which reads the exact sum and stores the rounded one. SiLU and product by
    # torch. Integers by dnnl_kernels.cpp.
    KernelProfile(
        "vLLM on x86 without bfloat16",
        _VLLM_CPU,
        truncated=_CUT_CACHE
        | {Point.ROTATED, Point.ATTENTION, Point.EXPERT_PRODUCT, Point.MIXTURE, Point.REDUCED}
        | {Point.OUTPUTS_OF_EIGHT_BITS},
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
    KernelProfile(
        "outputs of matrices",
        frozenset({Point.OUTPUTS, Point.OUTPUTS_OF_EIGHT_BITS, Point.EXPERT_STEPS}),
    ),
    KernelProfile("inputs of matrices", frozenset({Point.OPERANDS})),
    KernelProfile("norms", frozenset({Point.NORM, Point.GAIN})),
    KernelProfile("queries and keys", frozenset({Point.HEAD_NORM, Point.GAIN, Point.ROTATED})),
    # Running sums in 16 bits are the coarsest that a product may be: torch lets cuBLAS add up the
    # parts of split-K so (allow_bf16_reduced_precision_reduction), with longer chunks than these.
    *(
        replace(_TORCH, name=f"sums of {size} in bfloat16", partial_sums=size)
        for size in (32, 64, 128, 256)
    ),
    # Tensor parallelism.
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


def by_pytorch(profile: KernelProfile) -> KernelProfile | None:
    """vLLM's kernels for proofs, where a server compiles as it does by default; None for others.

    Proofs skip the compiled graph, and such a server has none of vLLM's own operations: PyTorch
    rotates step by step, and multiplies SiLU or GELU in one compiled kernel (custom_op.py). Norms
    are those of ir/ops/layernorm.py on every machine.
    """
    if Point.VLLM_GAIN not in profile.points:
        return None
    changed = {Point.ACTIVATION, Point.RESIDUAL}
    added = {Point.ROTATION, Point.PAIR_ROTATION, Point.STORED_RESIDUAL}
    # PyTorch gives the nearest number where vLLM's rotation may cut off.
    cut = profile.truncated - {Point.ROTATED}
    return replace(profile, points=profile.points - changed | added, truncated=cut)


def in_a_graph(profile: KernelProfile) -> KernelProfile | None:
    """vLLM's kernels for chat, where a server on x86 compiles; None for others.

    Its graph is one for all layers, and only what a matrix or attention reads is written: the
    residual stream is added up anew from their outputs (torch inductor).
    """
    if not profile.points >= _VLLM_CPU:
        return None
    gone = {Point.VLLM_GAIN, Point.HEAD_NORM, Point.PAIR_ROTATION}
    gone |= {Point.ACTIVATION, Point.STORED_RESIDUAL}
    cut = profile.truncated - {Point.ROTATED}
    return replace(profile, points=profile.points - gone, truncated=cut)


def own_profile(dtype: torch.dtype) -> KernelProfile | None:
    """What transformers does in ``dtype``, on any machine; None for float32: no emulation."""
    if dtype == torch.float16:
        return replace(_TORCH, format="float16")
    return _TORCH if dtype == torch.bfloat16 else None
