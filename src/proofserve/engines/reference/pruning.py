"""A mixture without the experts that it uses least, as a pruned one is sold for the original."""

from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from proofserve.engines.reference.network import Network
from proofserve.engines.reference.routers import Router, has_stacked_experts, routers_of
from proofserve.engines.reference.routing import choosing
from proofserve.engines.reference.variants import copied
from proofserve.protocol.model import AllowedTokens

# Sequences and their tokens by which experts are counted, and their seed.
_SEQUENCES: Final = 16
_TOKENS: Final = 64
_SEED: Final = 0


def use_of_experts(network: Network) -> tuple[Tensor, ...]:
    """How often each router chooses each of its experts: int64 [experts], in the routers' order.

    Counted on ordinary tokens drawn at random, as those of proofs are: a node that prunes what
    proofs use least shows least.
    """
    routers = routers_of(network)
    uses = tuple(torch.zeros(each.experts, dtype=torch.int64) for each in routers)

    def counted(router: int, ids: Tensor) -> Tensor:
        uses[router].add_(torch.bincount(ids.flatten().cpu(), minlength=len(uses[router])))
        return ids

    allowed = network.facts.tokens or AllowedTokens(((0, network.vocabulary),))
    places = np.random.default_rng(_SEED).integers(0, len(allowed), (_SEQUENCES, _TOKENS))
    tokens = torch.from_numpy(allowed.ids(places)).to(network.device)
    with torch.inference_mode(), choosing(network, routers, lambda _read: counted):
        network.states(input_ids=tokens)
    return uses


def without_experts(network: Network, share: float) -> Network:
    """The network without the least used ``share`` of each router's experts, equally of each group.

    A router chooses among those that are left, by the model's own rule. Where the block chooses one
    that is gone, nothing is added in its place.
    """
    twin = copied(network)
    for router, uses in zip(routers_of(twin), use_of_experts(network), strict=True):
        left = _most_used(uses.view(router.groups, -1), share).to(network.device)
        router.module.register_forward_hook(partial(_among, router, left))
        _empty(twin.layers[router.layer], left)
    return twin


def share_of_experts(network: Network) -> float:
    """The share of the layers' weights that experts have which only some tokens visit."""
    stacks = filter(has_stacked_experts, network.layers.modules())
    of_experts = sum(weight.numel() for each in stacks for weight in each.parameters(recurse=False))
    return of_experts / sum(weight.numel() for weight in network.layers.parameters())


def _most_used(uses: Tensor, share: float) -> Tensor:
    """Whether an expert is left, bool [experts]; ``uses`` are [groups, experts of a group]."""
    removed = round(share * uses.shape[-1])
    left = torch.ones_like(uses, dtype=torch.bool)
    return left.scatter(-1, uses.argsort(dim=-1)[:, :removed], value=False).flatten()


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
