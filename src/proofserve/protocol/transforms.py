"""What the protocols do to hidden states: reflect, normalise, flip signs, pick and rotate."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from proofserve.protocol.device import choice
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.murmur import as_ordered, hash_keys, seed_bits

# What a decoder layer returns: a tensor, or a tuple that begins with hidden state and residual.
LayerOutput: TypeAlias = Tensor | tuple[Any, ...]

_EPSILON = 1e-8
# A sign is +1 where the uniform of the same hash exceeds one half, that is from 0x80000081 on:
# float32 rounds every smaller hash to 0.5 or less. This is that bound in as_ordered's terms.
_FIRST_POSITIVE = 0x81


def reflect(x: Tensor, v: Tensor) -> Tensor:
    """R(x, v) = x - 2(x.v)v along the last axis, in the dtype of both (protocol 0.7).

    ``v`` broadcasts against ``x``: one vector for all rows or one per row.
    """
    return x - 2 * (x * v).sum(dim=-1, keepdim=True) * v


def normalise(x: Tensor) -> Tensor:
    """x/(||x|| + 1e-8) along the last axis, in the dtype of ``x`` (A.2.3, A.3, B.1.5, B.1.8)."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / (length + _EPSILON)


def normalise_reflect(x: Tensor, v: Tensor) -> Tensor:
    return reflect(normalise(x), v)


def map_layer_output(output: LayerOutput, step: Callable[[Tensor], Tensor]) -> LayerOutput:
    """Apply ``step`` to hidden state and to residual; the other elements stay (A.3, B.1.2).

    They are elements 0 and 1 of a tuple. A 1-tuple and a bare tensor have no residual.
    """
    if isinstance(output, tuple):
        return (*map(step, output[:2]), *output[2:])
    return step(output)


def sign_flips(seeds: Sequence[int], dim: int, device: torch.device) -> Tensor:
    """A sign per seed and dimension: float32 [b, dim] of +1 and -1 (A.2.2)."""
    ordered = as_ordered(hash_keys(seed_bits(seeds, device), _indices(dim, device)))
    return (ordered >= _FIRST_POSITIVE).to(torch.float32).mul_(2).sub_(1)


def pick(seeds: Sequence[int], dim: int, k: int, device: torch.device) -> Tensor:
    """The ``k`` of ``dim`` indices with the smallest hashes, in cuda order: int64 [b, k] (B.1.6).

    Cuda order is what the network's GPUs report: the k-1 smallest by ascending index, then the
    index of the k-th smallest. Raises ProtocolError for ``k_dim`` outside 1..dim.
    """
    by_score = pick_by_score(seeds, dim, k, device)
    return torch.cat((by_score[:, :-1].sort(dim=1).values, by_score[:, -1:]), dim=1)


def pick_by_score(seeds: Sequence[int], dim: int, k: int, device: torch.device) -> Tensor:
    """As ``pick``, in score order: by ascending hash (B.1.6).

    The hash is a bijection of the index, so there are no ties and the order is exact.
    """
    if not 1 <= k <= dim:
        raise ProtocolError("k_dim", f"{k} is outside 1..{dim}, the hidden size")
    ordered = as_ordered(hash_keys(seed_bits(seeds, device), _indices(dim, device)))
    return ordered.topk(k, dim=1, largest=False, sorted=True).indices


def rotate(x: Tensor, steps: Tensor) -> Tensor:
    """Reflect ``x`` [b, d] by ``steps`` [b, s, d] one after the other (A.2.4, B.1.7). float32."""
    if kernels := choice.kernels_for(x.device):
        rotated: Tensor = kernels.rotate(x, steps)
        return rotated
    for v in steps.unbind(dim=1):
        x = reflect(x, v)
    return x


def _indices(dim: int, device: torch.device) -> Tensor:
    return torch.arange(dim, dtype=torch.int32, device=device)
