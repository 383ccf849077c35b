"""The artifact protocol: one short vector per nonce, picked from its hidden state and rotated."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proofserve.protocol import ARTIFACT, ARTIFACT_K_DIM, ARTIFACT_LAYERS
from proofserve.protocol.draws import unit_vectors
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.identity import Block, Challenge, seed
from proofserve.protocol.inputs import EmbeddingBlock
from proofserve.protocol.scheme import ModelFacts, Scheme
from proofserve.protocol.transforms import normalise, pick, reflect, rotate


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
