"""A network with a part left out or changed, as a cheating prover would do to save work.

Each function returns a new ``Network`` and leaves the old one as it is. The two share the weights
that do not change, so that a variant costs only the memory of what it changes.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from proofserve.engines.reference.network import Network
from proofserve.engines.reference.precision import redrawn


def without_layers(network: Network, left_out: Collection[int]) -> Network:
    """The network without the layers of these indices; each returns its input.

    Without any layer only the final norm remains. Raises ValueError for an index of no layer.
    """
    twin = _twin(network)
    for index in left_out:
        if not 0 <= index < len(twin.layers):
            raise ValueError(f"there is no layer {index} among {len(twin.layers)}")
        twin.layers[index] = _SkippedLayer()
    return twin


def last_tokens_only(network: Network, count: int) -> Network:
    """The network that reads only the last ``count`` tokens, at their own positions.

    Raises ValueError for a ``count`` below 1.
    """
    if count < 1:
        raise ValueError(f"count: {count} is below 1")
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


def with_redrawn_matrices(network: Network) -> Network:
    """The network with every matrix drawn at random, the same numbers in every call.

    Each keeps its mean and deviation, so it is like a model of this shape with other training.
    """
    generator = torch.Generator().manual_seed(0)
    return with_matrices(network, lambda weight: redrawn(weight, generator))


def _twin(network: Network) -> Network:
    shared = {id(weight): weight for weight in network.decoder.parameters()}
    return replace(network, decoder=copy.deepcopy(network.decoder, shared))


class _SkippedLayer(nn.Module):
    """Returns its input. It replaces a layer, so that the other layers keep their indices."""

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
