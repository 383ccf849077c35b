"""The network's two protocols: distances to a target (A) and short vectors (B).

Random embeddings go in, and of each sequence the last state comes out, reflected and rotated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from proofserve.protocol import ARTIFACT, ARTIFACT_K_DIM, ARTIFACT_LAYERS
from proofserve.protocol.device import kernels_for
from proofserve.protocol.draws import (
    as_ordered,
    fill_normal,
    hash_keys,
    normal,
    seed_bits,
    unit_vectors,
)
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.identity import (
    Block,
    Challenge,
    layer_string,
    projection_string,
    seed,
    target_string,
    words,
)
from proofserve.protocol.scheme import BlockScheme, LayerOutput, ModelFacts, Scheme

_EPSILON = 1e-8
# A sign is +1 where the uniform of the same hash exceeds one half, that is from 0x80000081 on:
# float32 rounds every smaller hash to 0.5 or less. This is that bound in as_ordered's terms.
_FIRST_POSITIVE = 0x81
# Parts of a sequence that are seeded each by its own word (0.9).
_SEGMENTS = 8
OUTPUT_DIM = 8192
REFLECTIONS = 8
_PROJECTION_SCALE = 0.02


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
    if kernels := kernels_for(x.device):
        rotated: Tensor = kernels.rotate(x, steps)
        return rotated
    for v in steps.unbind(dim=1):
        x = reflect(x, v)
    return x


def _indices(dim: int, device: torch.device) -> Tensor:
    return torch.arange(dim, dtype=torch.int32, device=device)


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


def is_winner(distance: float, r_target: float) -> bool:
    """Whether a nonce wins: its distance is strictly below the target radius (A.2.8)."""
    return distance < r_target


def projection(block_hash: str, out_dim: int, hidden_size: int, device: torch.device) -> Tensor:
    """The block's random output matrix, float32 [out_dim, hidden_size] (A.2.5)."""
    flat = normal([seed(projection_string(block_hash))], out_dim * hidden_size, device)
    return flat.view(out_dim, hidden_size).mul_(_PROJECTION_SCALE)


def target(block_hash: str, dim: int, device: torch.device) -> Tensor:
    """The block's target direction, float32 [dim] of length 1 (A.2.6)."""
    return unit_vectors([seed(target_string(block_hash))], dim, device)[0]


@dataclass(frozen=True)
class DistanceScheme(Scheme):
    """``distance-v1``: A.1 and A.2, with the layer transform of A.3 as an option."""

    sign_flips: bool = True
    layer_hooks: bool = False

    name = "distance-v1"
    width = 1

    def to_wire(self) -> dict[str, str | int | bool]:
        return {"name": self.name, "sign_flips": self.sign_flips, "layer_hooks": self.layer_hooks}

    def for_block(self, block: Block, model: ModelFacts, device: torch.device) -> "DistanceBlock":
        return DistanceBlock(self, block, model, device)


class DistanceBlock(EmbeddingBlock):
    def __init__(
        self, scheme: DistanceScheme, block: Block, model: ModelFacts, device: torch.device
    ) -> None:
        step = normalise_reflect if scheme.layer_hooks else None
        super().__init__(block, model, device, layer_step=step)
        self._sign_flips = scheme.sign_flips

    @cached_property
    def projection(self) -> Tensor:
        """float32 [8192, hidden_size], 32 KiB per hidden dimension."""
        return projection(self.block.hash, OUTPUT_DIM, self.hidden_size, self.device)

    @cached_property
    def target(self) -> Tensor:
        return target(self.block.hash, OUTPUT_DIM, self.device)

    def finish(self, public_key: str, nonces: Sequence[int], states: Tensor) -> Tensor:
        """Distances float32 [len(nonces), 1] within 0..2 (A.2); see ``BlockScheme.finish``.

        A hidden state of zeros has no direction and gives NaN.
        """
        challenge = Challenge(self.block.hash, public_key)
        h = self._hidden_rows(nonces, states)
        if self._sign_flips:
            seeds = [seed(challenge.sign_string(nonce)) for nonce in nonces]
            h = h * sign_flips(seeds, self.hidden_size, self.device)
        h = rotate(normalise(h), self._reflections(challenge, nonces))
        z = h @ self.projection.T
        # No epsilon here, by the protocol: this is where zeros become NaN.
        direction = z / torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        distances: Tensor = torch.linalg.vector_norm(direction - self.target, dim=-1, keepdim=True)
        return distances

    def _reflections(self, challenge: Challenge, nonces: Sequence[int]) -> Tensor:
        seeds = [
            seed(challenge.reflection_string(nonce, index))
            for nonce in nonces
            for index in range(REFLECTIONS)
        ]
        vectors = unit_vectors(seeds, self.hidden_size, self.device)
        return vectors.view(len(nonces), REFLECTIONS, self.hidden_size)


@dataclass(frozen=True)
class ArtifactScheme(Scheme):
    """``artifact-v1`` (B), or with ``layer_reflections`` ``artifact-v1-layers`` (B').

    Raises ProtocolError for ``k_dim`` below 1 and for ``stronger_rng`` without layer reflections,
    a combination that has no name.
    """

    k_dim: int = ARTIFACT_K_DIM
    layer_reflections: bool = False
    stronger_rng: bool = False

    def __post_init__(self) -> None:
        if self.k_dim < 1:
            raise ProtocolError("k_dim", f"{self.k_dim} is below 1")
        if self.stronger_rng and not self.layer_reflections:
            raise ProtocolError("stronger_rng", "only artifact-v1-layers offers it")

    @property
    def name(self) -> str:
        return ARTIFACT_LAYERS if self.layer_reflections else ARTIFACT

    @property
    def width(self) -> int:
        return self.k_dim

    def to_wire(self) -> dict[str, str | int | bool]:
        """Keys ``name``, ``k_dim`` and ``stronger_rng``; the name tells the layer reflections."""
        return {"name": self.name, "k_dim": self.k_dim, "stronger_rng": self.stronger_rng}

    def for_block(self, block: Block, model: ModelFacts, device: torch.device) -> "ArtifactBlock":
        """Bind to a block; raises ProtocolError when ``k_dim`` exceeds the hidden size."""
        if self.k_dim > model.hidden_size:
            limit = model.hidden_size
            raise ProtocolError("k_dim", f"{self.k_dim} exceeds the hidden size {limit}")
        return ArtifactBlock(self, block, model, device)


class ArtifactBlock(EmbeddingBlock):
    def __init__(
        self, scheme: ArtifactScheme, block: Block, model: ModelFacts, device: torch.device
    ) -> None:
        step = reflect if scheme.layer_reflections else None
        super().__init__(block, model, device, step, scheme.stronger_rng)
        self._k_dim = scheme.k_dim

    def finish(self, public_key: str, nonces: Sequence[int], states: Tensor) -> Tensor:
        """Vectors float32 [len(nonces), k_dim] of length 1 (B.1.3 to B.1.8); see ``BlockScheme``.

        A hidden state that is zero in every picked dimension gives a vector of zeros.
        """
        challenge = Challenge(self.block.hash, public_key)
        h = normalise(self._hidden_rows(nonces, states))
        seeds = [seed(challenge.pick_string(nonce, self._k_dim)) for nonce in nonces]
        indices = pick(seeds, self.hidden_size, self._k_dim, self.device)
        steps = rotation_steps(challenge, nonces, self._k_dim, self.device)
        return normalise(rotate(h.gather(1, indices), steps))


def rotation_steps(
    challenge: Challenge, nonces: Sequence[int], k_dim: int, device: torch.device
) -> Tensor:
    """The reflections that make up each nonce's rotation: float32 [b, k_dim - 1, k_dim] (B.1.7)."""
    seeds = [
        seed(challenge.rotation_string(nonce, k_dim, step))
        for nonce in nonces
        for step in range(k_dim - 1)
    ]
    return unit_vectors(seeds, k_dim, device).view(len(nonces), k_dim - 1, k_dim)
