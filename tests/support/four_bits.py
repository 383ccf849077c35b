"""The cheapest forgery that pays: the right model with its weights rounded to 4 bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.network import Network, load

LEVELS = 7


def engine_of(model: Path, dtype: str, four_bits: bool = False) -> ReferenceEngine:
    """The reference engine of a checkpoint, or of what 4 bits leave of it."""
    network = load(model, dtype, "cpu")
    if four_bits:
        _round(network)
    return ReferenceEngine(network, forward_batch=8)


@contextmanager
def one_thread() -> Iterator[None]:
    """For models so small that threads wait for each other, where other tests run, for seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def _round(network: Network) -> None:
    """Every Linear weight to the nearest of 15 levels, symmetric, scaled per output channel."""
    for module in network.decoder.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.float()
            scale = weight.abs().amax(dim=1, keepdim=True) / LEVELS
            levels = (weight / scale).round()
            assert levels.unique().numel() <= 2 * LEVELS + 1
            module.weight.copy_(levels * scale)
