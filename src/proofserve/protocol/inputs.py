"""What the network's two protocols share: input embeddings, and one state read per nonce."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from proofserve.protocol.draws import fill_normal, normal, unit_vectors
from proofserve.protocol.identity import Block, Challenge, layer_string, seed, words
from proofserve.protocol.scheme import BlockScheme, ModelFacts
from proofserve.protocol.transforms import LayerOutput, map_layer_output

_SEGMENTS = 8


class EmbeddingBlock(BlockScheme):
    """A scheme of version 1 on a block: random embeddings in, each sequence's last state out."""

    def __init__(
        self,
        block: Block,
        model: ModelFacts,
        device: torch.device,
        layer_step: Callable[[Tensor, Tensor], Tensor] | None = None,
        stronger_inputs: bool = False,
    ) -> None:
        super().__init__(block, model, device)
        self._layer_step = layer_step
        self.uses_layer_transforms = layer_step is not None
        self._stronger_inputs = stronger_inputs
        self._layer_vectors: dict[tuple[int, torch.dtype], Tensor] = {}

    def inputs(
        self, public_key: str, nonces: Sequence[int], seq_len: int, dtype: torch.dtype
    ) -> Tensor:
        """Input embeddings [len(nonces), seq_len, hidden_size] in ``dtype`` (protocol 0.8, 0.9)."""
        challenge = Challenge(self.block.hash, public_key)
        strings = [challenge.input_string(nonce) for nonce in nonces]
        return input_embeddings(
            strings, seq_len, self.hidden_size, dtype, self.device, self._stronger_inputs
        )

    def layer_transform(self, layer: int, output: LayerOutput) -> LayerOutput:
        step = self._layer_step
        if step is None:
            return super().layer_transform(layer, output)
        return map_layer_output(output, lambda x: step(x, self._layer_vector(layer, x.dtype)))

    def _hidden_rows(self, nonces: Sequence[int], states: Tensor) -> Tensor:
        self._require_shape(states, len(nonces), self.hidden_size)
        rows = states.to(torch.float32)
        # Dividing by an infinite norm would turn a broken row into zeros, which look valid.
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return rows.masked_fill(~norms.isfinite(), torch.nan)

    def _layer_vector(self, layer: int, dtype: torch.dtype) -> Tensor:
        key = layer, dtype
        if key not in self._layer_vectors:
            string = layer_string(self.block.hash, layer)
            vector = unit_vectors([seed(string)], self.hidden_size, self.device)[0]
            self._layer_vectors[key] = vector.to(dtype)
        return self._layer_vectors[key]


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
        digests = [words(string) for string in strings]
        length = -(-total // _SEGMENTS)
        # Rounding the length up can leave the last segment short and the last words unused.
        for index, start in enumerate(range(0, total, length)):
            fill_normal(flat[:, start : start + length], [digest[index] for digest in digests])
    else:
        flat = normal([seed(string) for string in strings], total, device, dtype)
    return flat.view(len(strings), seq_len, dim)
