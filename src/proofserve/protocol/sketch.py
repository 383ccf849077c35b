"""Sketches: prompts of token ids, and a short projection of every position's final state.

In ``sketch-v2`` the block also chooses the experts of a mixture; on a dense model its numbers are
those of ``sketch-v1``. The formulas stand in ``docs/native.md``. All integers, so tokens, signs and
experts, are exact on every device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proofserve.protocol import SKETCH, SKETCH_2, SKETCH_K_DIM, TWINS
from proofserve.protocol.device import to_device
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import DRAWS, BlockScheme, ExpertLayer, ModelFacts, Scheme
from proofserve.protocol.shake import signs, streams, u64

_VERSION = b"proofserve sketch-v1\0"
_U64 = 8
# Numbers of float32 states that a device holds at once.
_DEVICE_TILE = 2**24


@dataclass(frozen=True)
class SketchScheme(Scheme):
    """``sketch-v1``, or -v2 with seeded experts. Raises ProtocolError: ``k_dim`` not in 1..4096."""

    k_dim: int = SKETCH_K_DIM
    seeded_experts: bool = False

    sequences_per_nonce = TWINS

    def __post_init__(self) -> None:
        if not 1 <= self.k_dim <= 4096:
            raise ProtocolError("k_dim", f"{self.k_dim} is outside 1..4096")

    @property
    def name(self) -> str:
        return SKETCH_2 if self.seeded_experts else SKETCH

    @property
    def width(self) -> int:
        """Both twins' sketches, the first twin's first."""
        return TWINS * self.k_dim

    def to_wire(self) -> dict[str, str | int | bool]:
        return {"name": self.name, "k_dim": self.k_dim}

    def for_block(self, block: Block, model: ModelFacts, device: torch.device) -> "SketchBlock":
        """Bind to a block; raises ProtocolError for a model without a weights digest or tokens."""
        return SketchBlock(self, block, model, device)


def cost_of_few_values(scheme: Scheme) -> str | None:
    """What a sketch of fewer values than the default costs its validators; None for any other."""
    if not isinstance(scheme, SketchScheme) or scheme.k_dim >= SKETCH_K_DIM:
        return None
    times = SKETCH_K_DIM / scheme.k_dim
    return (
        f"k_dim {scheme.k_dim}: distances of such sketches spread {math.sqrt(times):.1f} times as"
        f" far as with the default of {SKETCH_K_DIM}, so a verdict needs some {times:.1f} times as"
        " many nonces"
    )


class SketchBlock(BlockScheme):
    reads_every_position = True

    def __init__(
        self, scheme: SketchScheme, block: Block, model: ModelFacts, device: torch.device
    ) -> None:
        super().__init__(block, model, device)
        if model.tokens is None or model.weights_digest is None:
            raise ProtocolError(
                "scheme", f"{scheme.name} needs the model's tokenizer and weights digest"
            )
        self._tokens = model.tokens
        self._digest = bytes.fromhex(model.weights_digest)
        self._k_dim = scheme.k_dim
        self.chooses_experts = scheme.seeded_experts
        # Of the last length only: a client may ask for any number of lengths.
        self._rows: tuple[int, Tensor] | None = None
        self._routing: tuple[int, NDArray[np.uint64]] = 0, np.empty((0, 0, DRAWS), np.uint64)

    def inputs(
        self,
        public_key: str,
        nonces: Sequence[int],
        seq_len: int,
        dtype: torch.dtype,  # noqa: ARG002
    ) -> Tensor:
        """Token ids int64 [2 * len(nonces), seq_len]: each nonce's twins; ``dtype`` is not used."""
        places = self._places(public_key, nonces, seq_len)
        return to_device(torch.from_numpy(self._tokens.ids(places)), self.device)

    def experts(self, layer: int, of: ExpertLayer, seq_len: int) -> Tensor:
        drawn = self._routing_of(layer, seq_len)
        return torch.from_numpy(of.experts_of(drawn)).to(self.device)

    def finish(self, public_key: str, nonces: Sequence[int], states: Tensor) -> Tensor:
        """z of both twins, float32 [len(nonces), 2 * k_dim]; see ``BlockScheme``.

        ``states`` [2 * len(nonces), seq_len, hidden_size] are the outputs of the final norm.
        """
        seq_len = states.shape[1]
        self._require_shape(states, TWINS * len(nonces), seq_len, self.hidden_size)
        rows = self._rows_of(seq_len)
        drawn = np.repeat(self._signs(public_key, nonces, seq_len), TWINS, axis=0)
        of_rows = to_device(torch.from_numpy(drawn), self.device)
        # On a CPU one sequence at a time, which stays in the cache; elsewhere launches count. A
        # float32 copy of all states at once could take gigabytes.
        on_cpu = self.device.type == "cpu"
        part = 1 if on_cpu else max(1, _DEVICE_TILE // (seq_len * self.hidden_size))
        parts = zip(torch.split(states, part), torch.split(of_rows, part), strict=True)
        sketches = torch.cat([_sketches(h, s, rows) for h, s in parts])
        return sketches.view(len(nonces), TWINS * self._k_dim)

    def _places(self, public_key: str, nonces: Sequence[int], seq_len: int) -> NDArray[np.int64]:
        """Places among the allowed tokens: int64 [2 * len(nonces), seq_len], twin after twin."""
        count = len(self._tokens)
        drawn = self._streams("tokens", nonces, seq_len, public_key, _U64 * seq_len).view("<u8")
        steps = self._streams("twin", nonces, seq_len, public_key, _U64).view("<u8")[:, 0]
        places = np.repeat((drawn % np.uint64(count)).astype(np.int64), TWINS, axis=0)
        step = (steps % np.uint64(count - 1)).astype(np.int64)
        places[1::TWINS, 0] = (places[::TWINS, 0] + 1 + step) % count
        return places

    def _signs(self, public_key: str, nonces: Sequence[int], seq_len: int) -> NDArray[np.float32]:
        """float32 [len(nonces), seq_len]."""
        length = math.ceil(seq_len / 8)
        return signs(self._streams("signs", nonces, seq_len, public_key, length), seq_len)

    def _rows_of(self, seq_len: int) -> Tensor:
        """The projection float32 [k_dim, hidden_size] of +-1 / sqrt(k_dim)."""
        if self._rows is None or self._rows[0] != seq_len:
            count = self._k_dim * self.hidden_size
            # What belongs to the block alone has no key and the nonce 0.
            drawn = self._streams("rows", [0], seq_len, "", math.ceil(count / 8))[0]
            rows = signs(drawn, count).reshape(self._k_dim, self.hidden_size)
            scaled = torch.from_numpy(rows).to(self.device) / math.sqrt(self._k_dim)
            self._rows = seq_len, scaled
        return self._rows[1]

    def _routing_of(self, layer: int, seq_len: int) -> NDArray[np.uint64]:
        """The numbers from which the experts of ``layer`` are chosen: [seq_len, DRAWS]."""
        known, drawn = self._routing
        if known != seq_len or layer >= len(drawn):
            # A longer stream begins as a shorter one, so layers need not be counted beforehand.
            length = (layer + 1) * seq_len * DRAWS * _U64
            stream = self._streams("routing", [0], seq_len, "", length)
            drawn = stream.view("<u8").reshape(layer + 1, seq_len, DRAWS)
            self._routing = seq_len, drawn
        numbers: NDArray[np.uint64] = drawn[layer]
        return numbers

    def _streams(
        self, label: str, nonces: Sequence[int], seq_len: int, public_key: str, length: int
    ) -> NDArray[np.uint8]:
        """Bytes of SHAKE-256 of the seed of ``label`` for each nonce: [len(nonces), length]."""
        shared = (
            label.encode(),
            self.block.hash.encode(),
            u64(self.block.height),
            public_key.encode(),
            self._digest,
            u64(seq_len),
            u64(self._k_dim),
        )
        drawn = b"".join(streams(_VERSION, shared, map(u64, nonces), length))
        return np.frombuffer(drawn, np.uint8).reshape(len(nonces), length)


def _sketches(states: Tensor, signs: Tensor, rows: Tensor) -> Tensor:
    """z float32 [n, k_dim] of ``states`` [n, seq_len, hidden], ``signs`` [n, seq_len]."""
    exact = states.to(torch.float32)
    norms = torch.linalg.vector_norm(exact, dim=2)
    # Dividing by an infinite norm would turn a broken state into zeros, which look valid.
    weights = signs / norms.masked_fill(~norms.isfinite(), torch.nan)
    y = torch.bmm(weights.unsqueeze(1), exact).squeeze(1)
    z: Tensor = (y / torch.linalg.vector_norm(y, dim=1, keepdim=True)) @ rows.T
    return z
