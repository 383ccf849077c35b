"""Skips work whose result is not published: the last MLP for all tokens but each sequence's last.

For schemes that publish the last position of each sequence alone. sketch-v1 reads every position,
so that nothing of its forward can be left out (``BlockScheme.reads_every_position``). Every earlier
layer needs all positions, because later tokens attend to them; after the last attention nothing
mixes positions. The published numbers are the same (ADR 8).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from proofserve.engines.vllm import compat_worker


@contextmanager
def published_rows_only(model: torch.nn.Module, sequences: int, seq_len: int) -> Iterator[None]:
    """Within the context, the last MLP computes one row per sequence, and zeros for the others.

    Rows are ``sequences * seq_len`` tokens, one sequence after the other. A model whose last layer
    is not on this rank, has no ``mlp``, or has a mixture of experts there, is left as it is.
    """
    mlp = compat_worker.last_mlp(model)
    rows = sequences * seq_len
    if mlp is None or seq_len == 1:
        yield
        return

    def narrow(_mlp: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args or args[0].shape[0] != rows:
            return args
        return (args[0].view(sequences, seq_len, -1)[:, -1].contiguous(), *args[1:])

    def widen(_mlp: torch.nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        if output.shape[0] != sequences:
            return output
        full = output.new_zeros(rows, output.shape[-1])
        full.view(sequences, seq_len, -1)[:, -1] = output
        return full

    with mlp.register_forward_pre_hook(narrow), mlp.register_forward_hook(widen):
        yield
