"""A network with a part left out or changed, as a cheating prover would do to save work.

Each function returns a new ``Network`` and leaves the old one as it is. A change is made to a copy
of each layer when a forward comes to it, so a variant costs the memory of one changed layer.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from proofserve.engines.reference.checkpoint import StandIn
from proofserve.engines.reference.forward import states
from proofserve.engines.reference.network import Network, round_input
from proofserve.engines.reference.rounding import Rounding, in_dtype, integers, redrawn
from proofserve.engines.reference.routing import Router, has_stacked_experts, routers_in, routers_of
from proofserve.protocol.scheme import AllowedTokens


def without_layers(network: Network, left_out: Collection[int]) -> Network:
    """The network without the layers of these indices; each returns its input.

    Without any layer only the final norm remains. Raises ValueError for an index of no layer.
    """
    for index in left_out:
        if not 0 <= index < len(network.shapes):
            raise ValueError(f"there is no layer {index} among {len(network.shapes)}")
    kept = {*range(len(network.shapes))} - {*left_out}
    return network.changed(lambda index, layer: layer if index in kept else StandIn(layer))


def last_tokens_only(network: Network, count: int) -> Network:
    """The network that reads only the last ``count`` tokens, at their own positions.

    The state of every other position is the final norm of its embedding. Raises ValueError for a
    ``count`` below 1.
    """
    return replace(network, positions=slice(-_positive(count), None))


def first_tokens_only(network: Network, count: int) -> Network:
    """As ``last_tokens_only`` with the first tokens, whose states do not depend on later ones."""
    return replace(network, positions=slice(0, _positive(count)))


def _positive(count: int) -> int:
    if count < 1:
        raise ValueError(f"count: {count} is below 1")
    return count


def with_matrices(
    network: Network, change: Callable[[Tensor], Tensor], layers: Collection[int] | None = None
) -> Network:
    """The network with every weight matrix of its ``layers`` replaced by ``change`` of it.

    ``change`` gets [..., out, in] (experts of a mixture come stacked) and gives the same shape;
    norms and biases stay. ``layers`` are indices, None for all.
    """
    return _with_matrices(network, lambda _place: change, layers)


def with_random_matrices(
    network: Network, change: Callable[[torch.Generator], Callable[[Tensor], Tensor]]
) -> Network:
    """As ``with_matrices``; ``change`` draws from a generator that each matrix has of its own.

    Its numbers are the same in every forward.
    """
    # A seed is its place among all matrices: of one above 2^32 torch reads the low bits alone.
    return _with_matrices(network, lambda place: change(torch.Generator().manual_seed(place)))


def _with_matrices(
    network: Network,
    change_at: Callable[[int], Callable[[Tensor], Tensor]],
    layers: Collection[int] | None = None,
) -> Network:
    """``change_at`` gives what changes a matrix by its place among those of all layers."""
    counts = (sum(1 for _ in _matrices(layer)) for layer in network.shapes)
    firsts = [0, *accumulate(counts)]

    def changed(index: int, layer: nn.Module) -> nn.Module:
        if layers is None or index in layers:
            for place, (module, name, weight) in enumerate(_matrices(layer), firsts[index]):
                _replace(module, name, change_at(place)(weight))
        return layer

    return network.changed(changed)


def with_redrawn_matrices(network: Network) -> Network:
    """The network with every matrix drawn at random, the same numbers in every call.

    Each keeps its mean and deviation, so it is like a model of this shape with other training.
    """
    return with_random_matrices(
        network, lambda generator: in_dtype(partial(redrawn, generator=generator))
    )


def with_activations(network: Network, rounding: Rounding) -> Network:
    """The network whose layers round what goes into their matrices, token by token."""

    def changed(_index: int, layer: nn.Module) -> nn.Module:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                round_input(module, in_dtype(rounding))
        return layer

    return network.changed(changed)


def with_cache(network: Network, rounding: Rounding) -> Network:
    """The network whose attention reads rounded keys and values, as from a smaller KV cache."""
    return replace(network, cache=lambda _layer: (rounding, rounding))


def with_int8_attention(network: Network) -> Network:
    """The network whose attention multiplies 8-bit queries, keys and values, scaled by token."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> Any:
        rounded = in_dtype(integers(8))
        inputs = (rounded(each) for each in (query, key, value))
        return sdpa_attention_forward(module, *inputs, *args, **options)

    # transformers finds an attention by its name, in a register of its own.
    name = "proofserve_int8"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)

    def changed(_index: int, layer: nn.Module) -> nn.Module:
        for module in layer.modules():
            if (config := getattr(module, "config", None)) is not None:
                config._attn_implementation = name
        return layer

    return network.changed(changed)


def pruned(values: Tensor) -> Tensor:
    """``values`` with the two smaller of every four magnitudes set to zero (2:4 sparsity)."""
    groups = values.reshape(*values.shape[:-1], -1, 4)
    kept = groups.abs().topk(2, dim=-1).indices
    zeros = torch.zeros_like(groups)
    return zeros.scatter(-1, kept, groups.gather(-1, kept)).view(values.shape)


def of_rank(values: Tensor, share: float) -> Tensor:
    """The nearest matrices whose rank is ``share`` of the full one."""
    u, sizes, v = torch.linalg.svd(values, full_matrices=False)
    rank = max(1, round(share * sizes.shape[-1]))
    made: Tensor = (u[..., :rank] * sizes[..., None, :rank]) @ v[..., :rank, :]
    return made


def share_of_rank(network: Network, share: float) -> float:
    """The multiplications of the layers' matrices, factored by ``of_rank``, over those of now."""
    matrices = [weight for layer in network.shapes for *_, weight in _matrices(layer)]
    whole = sum(weight.numel() for weight in matrices)
    factored = 0
    for weight in matrices:
        out, length = weight.shape[-2:]
        rank = max(1, round(share * min(out, length)))
        factored += min(weight.numel(), weight.numel() // (out * length) * rank * (out + length))
    return factored / whole


def use_of_experts(network: Network) -> dict[int, Tensor]:
    """How often the router of a layer chooses each of its experts: int64 [experts] by layer.

    Counted on 16 sequences of 64 ordinary tokens drawn at random, as those of proofs are: a node
    that prunes what proofs use least shows least.
    """
    uses = {r.layer: torch.zeros(r.experts, dtype=torch.int64) for r in routers_of(network)}

    def counted(router: Router, ids: Tensor) -> Tensor:
        uses[router.layer].add_(torch.bincount(ids.flatten().cpu(), minlength=router.experts))
        return ids

    allowed = network.facts.tokens or AllowedTokens(((0, network.vocabulary),))
    places = np.random.default_rng(seed=0).integers(0, len(allowed), (16, 64))
    tokens = torch.from_numpy(allowed.ids(places)).to(network.device)
    states(network, tokens, lambda _read: counted)
    return uses


def without_experts(network: Network, share: float) -> Network:
    """The mixture without the least used ``share`` of each router's experts, as a pruned one.

    They are equally of each of its groups. A router chooses among those that are left, by the
    model's own rule. Where the block chooses one that is gone, nothing is added in its place.
    """
    left: dict[int, Tensor] = {}
    for router, uses in zip(routers_of(network), use_of_experts(network).values(), strict=True):
        grouped = uses.view(router.groups, -1)
        removed = grouped.argsort(dim=-1)[:, : round(share * grouped.shape[-1])]
        kept = torch.ones_like(grouped, dtype=torch.bool).scatter(-1, removed, value=False)
        left[router.layer] = kept.flatten().to(network.device)

    def among(router: Router, _: nn.Module, args: Any, output: Any) -> tuple[Tensor, ...]:
        return router.among(left[router.layer], output, args[1:])

    def changed(index: int, layer: nn.Module) -> nn.Module:
        for router in routers_in(index, layer):
            router.module.register_forward_hook(partial(among, router))
        stacks = filter(has_stacked_experts, layer.modules()) if index in left else ()
        for module in stacks:
            for name, stacked in [*module.named_parameters(recurse=False)]:
                is_left = left[index].view(-1, *[1] * (stacked.ndim - 1))
                _replace(module, name, torch.where(is_left, stacked.detach(), 0.0))
        return layer

    return network.changed(changed)


def share_of_experts(network: Network) -> float:
    """The share of the layers' weights that experts have which only some tokens visit."""
    modules = [module for layer in network.shapes for module in layer.modules()]
    stacks = filter(has_stacked_experts, modules)
    of_experts = sum(weight.numel() for each in stacks for weight in each.parameters(recurse=False))
    every = (weight for module in modules for weight in module.parameters(recurse=False))
    return of_experts / sum(weight.numel() for weight in every)


def _matrices(layer: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The weights [..., out, in] of a layer, and where they are."""
    for module in layer.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            if weight.ndim >= 2:
                yield module, name, weight.detach()


def _replace(module: nn.Module, name: str, made: Tensor) -> None:
    weight = module.get_parameter(name)
    setattr(module, name, nn.Parameter(made.to(weight.dtype), requires_grad=False))
