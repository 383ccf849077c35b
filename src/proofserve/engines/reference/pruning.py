"""A mixture without the experts that it uses least, as a pruned one is sold for the original."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from proofserve.engines.reference.forward import states
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.routers import Router, has_stacked_experts, routers_in, routers_of
from proofserve.protocol.scheme import AllowedTokens


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
    """The network without the least used ``share`` of each router's experts, equally of each group.

    A router chooses among those that are left, by the model's own rule. Where the block chooses one
    that is gone, nothing is added in its place.
    """
    left: dict[int, Tensor] = {}
    for router, uses in zip(routers_of(network), use_of_experts(network).values(), strict=True):
        grouped = uses.view(router.groups, -1)
        removed = grouped.argsort(dim=-1)[:, : round(share * grouped.shape[-1])]
        kept = torch.ones_like(grouped, dtype=torch.bool).scatter(-1, removed, value=False)
        left[router.layer] = kept.flatten().to(network.device)

    def changed(index: int, layer: nn.Module) -> nn.Module:
        for router in routers_in(index, layer):
            router.module.register_forward_hook(partial(_among, router, left[index]))
            _empty(layer, left[index])
        return layer

    return network.changed(changed)


def share_of_experts(network: Network) -> float:
    """The share of the layers' weights that experts have which only some tokens visit."""
    modules = [module for layer in network.shapes for module in layer.modules()]
    stacks = filter(has_stacked_experts, modules)
    of_experts = sum(weight.numel() for each in stacks for weight in each.parameters(recurse=False))
    every = (weight for module in modules for weight in module.parameters(recurse=False))
    return of_experts / sum(weight.numel() for weight in every)


def _among(
    router: Router, left: Tensor, _module: nn.Module, args: tuple[Tensor, ...], output: Any
) -> tuple[Tensor, ...]:
    return router.among(left, output, args[1:])


def _empty(layer: nn.Module, left: Tensor) -> None:
    """Set the matrices and biases of all experts but those ``left`` to zero, in new tensors."""
    for module in filter(has_stacked_experts, layer.modules()):
        for name, stacked in module.named_parameters(recurse=False):
            kept = left.view(-1, *[1] * (stacked.ndim - 1))
            made = torch.where(kept, stacked.detach(), torch.zeros((), dtype=stacked.dtype))
            setattr(module, name, nn.Parameter(made, requires_grad=False))
