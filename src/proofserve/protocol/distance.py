"""The distance protocol: one float per nonce, from its projected hidden state to a target."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from proofserve.protocol.draws import normal, unit_vectors
from proofserve.protocol.identity import Block, Challenge, projection_string, seed, target_string
from proofserve.protocol.inputs import EmbeddingBlock
from proofserve.protocol.scheme import ModelFacts, Scheme
from proofserve.protocol.transforms import normalise, normalise_reflect, rotate, sign_flips

OUTPUT_DIM = 8192
REFLECTIONS = 8
_PROJECTION_SCALE = 0.02


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
