"""The same network with a part left out or changed: what a prover saves work with.

Each function gives a new ``Network`` and leaves the old one as it is. Weights that do not change
are shared between the two, so that a variant costs the memory of what it changes.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from proofserve.engines.reference.network import Network


def without_layers(network: Network, left_out: Collection[int]) -> Network:
    """The network whose layers of these indices hand on what they are given.

    With all of them left out the final norm is all that remains. Raises ValueError for an index
    that is no layer.
    """
    twin = _twin(network)
    for index in left_out:
        if not 0 <= index < len(twin.layers):
            raise ValueError(f"there is no layer {index} among {len(twin.layers)}")
        twin.layers[index] = _HandsOn()
    return twin


def last_tokens_only(network: Network, count: int) -> Network:
    """The network that reads nothing but the last ``count`` tokens, at their own positions.

    Raises ValueError for a ``count`` below 1.
    """
    if count < 1:
        raise ValueError(f"{count} tokens have no last one")
    return replace(network, decoder=_LastTokens(network.decoder, count))


def with_matrices(network: Network, change: Callable[[Tensor], Tensor]) -> Network:
    """The network with every weight matrix of its layers replaced by ``change`` of it.

    ``change`` gets [..., out, in] (experts of a mixture come stacked) and gives the same shape;
    norms and biases stay.
    """
    twin = _twin(network)
    with torch.no_grad():
        for module in twin.layers.modules():
            for name, weight in module.named_parameters(recurse=False):
                if weight.ndim >= 2:
                    changed = change(weight.detach()).to(weight.dtype)
                    setattr(module, name, nn.Parameter(changed, requires_grad=False))
    return twin


def _twin(network: Network) -> Network:
    """Modules of its own around the same weights."""
    shared = {id(weight): weight for weight in network.decoder.parameters()}
    return replace(network, decoder=copy.deepcopy(network.decoder, shared))


class _HandsOn(nn.Module):
    """Stands where a layer was, so that the others keep their place and their kind of attention."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


class _LastTokens(nn.Module):
    def __init__(self, decoder: nn.Module, count: int) -> None:
        super().__init__()
        self._decoder = decoder
        self._count = count
        self.layers = decoder.layers

    def forward(self, inputs_embeds: Tensor, **options: Any) -> Any:
        n, length, _ = inputs_embeds.shape
        positions = torch.arange(length, device=inputs_embeds.device)[-self._count :].expand(n, -1)
        last = inputs_embeds[:, -self._count :]
        return self._decoder(inputs_embeds=last, position_ids=positions, **options)
