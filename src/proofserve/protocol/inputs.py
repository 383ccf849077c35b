"""Input embeddings: normal random numbers, the input of a proof forward (protocol 0.8, 0.9)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from proofserve.protocol.draws import fill_normal, normal
from proofserve.protocol.identity import seed, words

_SEGMENTS = 8


def input_embeddings(
    strings: Sequence[str],
    seq_len: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
    stronger: bool = False,
) -> Tensor:
    """Embeddings [len(strings), seq_len, dim] in ``dtype``, each computed in float32, rounded once.

    The ordinary form draws from the 32-bit seed of each string (0.8); ``stronger`` cuts each
    sequence into eight segments with a digest word of its own (0.9).
    """
    total = seq_len * dim
    if stronger:
        flat = torch.empty(len(strings), total, dtype=dtype, device=device)
        _fill_segments(flat, [words(string) for string in strings])
    else:
        flat = normal([seed(string) for string in strings], total, device, dtype)
    return flat.view(len(strings), seq_len, dim)


def _fill_segments(flat: Tensor, digests: Sequence[tuple[int, ...]]) -> None:
    total = flat.shape[1]
    length = -(-total // _SEGMENTS)
    # Rounding the length up can leave the last segment short and the last words unused.
    for index, start in enumerate(range(0, total, length)):
        fill_normal(flat[:, start : start + length], [digest[index] for digest in digests])
