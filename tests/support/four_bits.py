"""The cheapest forgery that pays: the right model with its weights rounded to 4 bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from proofserve.engines.reference.network import load
from proofserve.engines.reference.rounding import in_dtype
from proofserve.engines.reference.variants import with_matrices
from support.reference import Prover

LEVELS = 7


def engine_of(model: Path, dtype: str, four_bits: bool = False) -> Prover:
    """The reference engine with a checkpoint, or with what 4 bits leave of it."""
    network = load(model, dtype, "cpu")
    return Prover(with_matrices(network, in_dtype(_rounded)) if four_bits else network)


@contextmanager
def one_thread() -> Iterator[None]:
    """For models so small that threads wait for each other, where other tests run, for seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rounded(weight: Tensor) -> Tensor:
    """To the nearest of 15 levels, symmetric, scaled per output channel."""
    scale = weight.abs().amax(dim=-1, keepdim=True) / LEVELS
    levels = (weight / scale).round()
    assert levels.unique().numel() <= 2 * LEVELS + 1
    return levels * scale
