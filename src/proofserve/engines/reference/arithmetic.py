"""The arithmetic of other kernels: float32, rounded where a kernel of less precision rounds."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
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
    RESIDUAL = "the residual stream after each addition"
    STORED_RESIDUAL = "the residual stream as stored, while the next norm reads the exact sum"
    CACHE = "keys and values in a cache in fp8"


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """Where one set of kernels rounds, and to what; all else is float32.

    At ``truncated`` points the lower bits are cut off, elsewhere values become the nearest.
    ``partial_sums``: a matrix adds up its inputs in chunks of so many, and keeps the running sum in
    ``format``. ``ranks``: so many devices each add up a part of the inputs of the matrices that
    tensor parallelism splits; the parts are rounded, and so is every sum of them. ``fp8_cache``:
    attention reads keys and values from a cache in fp8. ``order``: a matrix adds up its inputs in
    two parts, cut where this number says; None leaves it to this machine. ``scaling``: how inputs
    become integers, where a checkpoint declares these.
    """

    name: str
    points: frozenset[Point]
    format: NumberFormat = "bfloat16"
    truncated: frozenset[Point] = frozenset()
    partial_sums: int | None = None
    ranks: int = 1
    fp8_cache: bool = False
    order: int | None = None
    scaling: Scaling = "division"


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


class Arithmetic:
    """What a profile does with float32 tensors; it changes none of them."""

    def __init__(self, profile: KernelProfile) -> None:
        self._profile = profile
        self.points = profile.points
        self._round = _ROUNDINGS[profile.format]

    def at(self, point: Point, values: Tensor) -> Tensor:
        """``values``, rounded if the profile rounds at ``point``."""
        if point not in self.points:
            return values
        if point in self._profile.truncated:
            # bfloat16 without its lower bits: the next number towards zero.
            return (values.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)
        return self._round(values)

    def as_served(self, values: Tensor) -> Tensor:
        """``values`` in the format that a node serves; TF32 is only what matrices read."""
        served = self._profile.format in {"bfloat16", "float16"}
        return self._round(values) if served else values

    def product(
        self, inputs: Tensor, weight: Tensor, *, split: bool = False, as_they_are: bool = False
    ) -> Tensor:
        """``inputs`` [..., in] times ``weight`` [out, in]; ``split`` if each rank has a part.

        Operands ``as_they_are`` are integers or fp8 times their scales, which no kernel rounds.
        """
        if as_they_are:
            adds_up: Callable[[Tensor, Tensor], Tensor] = _exact_sum
        else:
            adds_up = self._sum
            inputs, weight = self.at(Point.OPERANDS, inputs), self.at(Point.OPERANDS, weight)
        ranks = self._profile.ranks
        if split and ranks > 1:
            each = zip(inputs.chunk(ranks, -1), weight.chunk(ranks, -1), strict=True)
            return self._added(adds_up(a, b) for a, b in each)
        return adds_up(inputs, weight)

    def _sum(self, inputs: Tensor, weight: Tensor) -> Tensor:
        size, order = self._profile.partial_sums, self._profile.order
        if size is None and order is None:
            return functional.linear(inputs, weight)
        if size is None:
            cut = 1 + (order or 0) % (inputs.shape[-1] - 1)
            first = functional.linear(inputs[..., :cut], weight[:, :cut])
            return first + functional.linear(inputs[..., cut:], weight[:, cut:])
        weights = torch.split(weight, size, -1)

        def added(rows: Tensor) -> Tensor:
            chunks = zip(torch.split(rows, size, -1), weights, strict=True)
            return self._added(functional.linear(a, b) for a, b in chunks)

        if inputs.device.type != "cpu":
            return added(inputs)
        rows = inputs.flatten(0, -2)
        made = [added(few) for few in torch.split(rows, max(1, _RUNNING // len(weight)))]
        return torch.cat(made).view(*inputs.shape[:-1], len(weight))

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
        if not self._profile.fp8_cache:
            return stored
        return fp8_unscaled(stored, cut=Point.CACHE in self._profile.truncated)

    def attention(
        self, func: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """``func`` with the signature of scaled_dot_product_attention: [n, heads, seq_len, d]."""
        query, key, value = self.at(Point.OPERANDS, query), self.cached(key), self.cached(value)
        if Point.WEIGHTS not in self.points:
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
        scores = query @ key.mT * scale
        if options.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        attended = self.at(Point.WEIGHTS, weights) @ value / weights.sum(-1, keepdim=True)
        return self.at(Point.ATTENTION, attended)
