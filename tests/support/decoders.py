"""A network's decoder with all its layers in memory, for what reads it as a server does."""

import copy
from typing import Any

from torch import nn

from proofserve.engines.reference.checkpoint import StandIn
from proofserve.engines.reference.emulation import emulated
from proofserve.engines.reference.kernels import KernelProfile
from proofserve.engines.reference.network import Network


def decoder_of(network: Network) -> Any:
    """The decoder with the network's layers, changed and by its kernels.

    It reads with a cache of keys, too. What a network leaves out or rounds otherwise is not in it.
    """
    assert network.positions is None
    assert network.cache is None
    decoder = copy.deepcopy(network.checkpoint.decoder)
    layers = []
    for index in range(len(network.shapes)):
        layer = copy.deepcopy(network.checkpoint.layer(index))
        for change in network.changes:
            layer = change(index, layer)
        layers.append(_EmulatedLayer(layer, network.kernels))
    decoder.layers = nn.ModuleList(layers)
    return decoder


class _EmulatedLayer(StandIn):
    """A layer that rounds as ``kernels`` do, None for those of this machine."""

    def __init__(self, layer: nn.Module, kernels: KernelProfile | None) -> None:
        super().__init__(layer)
        self._whole = (layer,)
        self._kernels = kernels

    def forward(self, *args: Any, **options: Any) -> Any:
        (layer,) = self._whole
        with emulated(layer, self._kernels, is_layer=True):
            return layer(*args, **options)
