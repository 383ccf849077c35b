"""``sketch-v1``: prompts of token ids, and a short projection of every position's final state.

The formulas stand in ``docs/native.md``. All integers, so tokens and signs, are exact on every
device.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import BlockScheme, ModelFacts, Scheme

TWINS = 2
_VERSION = b"proofserve sketch-v1\0"
_U64 = 8


@dataclass(frozen=True)
class SketchScheme(Scheme):
    """``sketch-v1``. Raises ProtocolError for ``k_dim`` outside 1..4096."""

    k_dim: int = 64

    sequences_per_nonce = TWINS

    def __post_init__(self) -> None:
        if not 1 <= self.k_dim <= 4096:
            raise ProtocolError("k_dim", f"{self.k_dim} is outside 1..4096")

    @property
    def name(self) -> str:
        return "sketch-v1"

    @property
    def width(self) -> int:
        """Both twins' sketches, the first twin's first."""
        return TWINS * self.k_dim

    def to_wire(self) -> dict[str, str | int | bool]:
        return {"name": self.name, "k_dim": self.k_dim}

    @property
    def uses_layer_transforms(self) -> bool:
        return False

    def for_block(self, block: Block, model: ModelFacts, device: torch.device) -> "SketchBlock":
        """Bind to a block; raises ProtocolError for a model without a weights digest or tokens."""
        return SketchBlock(self, block, model, device)


class SketchBlock(BlockScheme):
    reads_every_position = True

    def __init__(
        self, scheme: SketchScheme, block: Block, model: ModelFacts, device: torch.device
    ) -> None:
        super().__init__(block, model, device)
        if model.tokens is None or model.weights_digest is None:
            raise ProtocolError(
                "scheme", "sketch-v1 needs the model's tokenizer and weights digest"
            )
        self._tokens = model.tokens
        self._digest = bytes.fromhex(model.weights_digest)
        self._k_dim = scheme.k_dim
        # Of the last length only: a client may ask for any number of lengths.
        self._rows: tuple[int, Tensor] | None = None

    def inputs(
        self,
        public_key: str,
        nonces: Sequence[int],
        seq_len: int,
        dtype: torch.dtype,  # noqa: ARG002
    ) -> Tensor:
        """Token ids int64 [2 * len(nonces), seq_len]: each nonce's twins, one after the other.

        ``dtype`` does not matter.
        """
        prompts = [self._twins(public_key, nonce, seq_len) for nonce in nonces]
        places = np.concatenate([*prompts, np.empty((0, seq_len), np.int64)])
        return torch.from_numpy(self._tokens.ids(places)).to(self.device)

    def finish(self, public_key: str, nonces: Sequence[int], states: Tensor) -> Tensor:
        """z of both twins, float32 [len(nonces), 2 * k_dim]; see ``BlockScheme``.

        ``states`` [2 * len(nonces), seq_len, hidden_size] are the outputs of the final norm.
        """
        seq_len = states.shape[1]
        self._require_shape(states, TWINS * len(nonces), seq_len, self.hidden_size)
        rows = self._rows_of(seq_len)
        drawn = [self._signs(public_key, nonce, seq_len) for nonce in nonces]
        signs = torch.from_numpy(np.repeat(np.array(drawn), TWINS, axis=0)).to(self.device)
        # One sequence at a time: a result must not depend on the others of its forward, and a
        # float32 copy of all states at once can take gigabytes.
        sketches = [_sketch(h, s, rows) for h, s in zip(states, signs, strict=True)]
        return torch.stack(sketches).view(len(nonces), TWINS * self._k_dim)

    def _twins(self, public_key: str, nonce: int, seq_len: int) -> NDArray[np.int64]:
        """Places among the allowed tokens: int64 [2, seq_len]."""
        count = len(self._tokens)
        drawn = self._stream("tokens", nonce, seq_len, public_key, _U64 * seq_len)
        first = (np.frombuffer(drawn, "<u8") % np.uint64(count)).astype(np.int64)
        second = first.copy()
        step = int.from_bytes(self._stream("twin", nonce, seq_len, public_key, _U64), "little")
        second[0] = (int(first[0]) + 1 + step % (count - 1)) % count
        return np.stack((first, second))

    def _signs(self, public_key: str, nonce: int, seq_len: int) -> NDArray[np.float32]:
        length = math.ceil(seq_len / 8)
        return _signs(self._stream("signs", nonce, seq_len, public_key, length), seq_len)

    def _rows_of(self, seq_len: int) -> Tensor:
        """The projection float32 [k_dim, hidden_size] of +-1 / sqrt(k_dim)."""
        if self._rows is None or self._rows[0] != seq_len:
            count = self._k_dim * self.hidden_size
            # What belongs to the block alone has no key and the nonce 0.
            drawn = self._stream("rows", 0, seq_len, "", math.ceil(count / 8))
            rows = _signs(drawn, count).reshape(self._k_dim, self.hidden_size)
            scaled = torch.from_numpy(rows).to(self.device) / math.sqrt(self._k_dim)
            self._rows = seq_len, scaled
        return self._rows[1]

    def _stream(self, label: str, nonce: int, seq_len: int, public_key: str, length: int) -> bytes:
        """``length`` bytes of SHAKE-256 of the seed of ``label``."""
        fields = (
            label.encode(),
            self.block.hash.encode(),
            _u64(self.block.height),
            public_key.encode(),
            self._digest,
            _u64(seq_len),
            _u64(self._k_dim),
            _u64(nonce),
        )
        packed = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
        seed = hashlib.sha256(_VERSION + packed).digest()
        return hashlib.shake_256(seed).digest(length)


def _sketch(states: Tensor, signs: Tensor, rows: Tensor) -> Tensor:
    """z float32 [k_dim] of one sequence: ``states`` [seq_len, hidden], ``signs`` [seq_len]."""
    exact = states.to(torch.float32)
    norms = torch.linalg.vector_norm(exact, dim=1)
    # Dividing by an infinite norm would turn a broken state into zeros, which look valid.
    y = (signs / norms.masked_fill(~norms.isfinite(), torch.nan)) @ exact
    z: Tensor = rows @ (y / torch.linalg.vector_norm(y))
    return z


def _signs(drawn: bytes, count: int) -> NDArray[np.float32]:
    """+1 for a bit of 1 and -1 for 0, the least significant bit of each byte first: [count]."""
    bits = np.unpackbits(np.frombuffer(drawn, np.uint8), count=count, bitorder="little")
    return bits.astype(np.float32) * 2 - 1


def _u64(number: int) -> bytes:
    # The nonces that fill up a forward are negative.
    return (number % 2**64).to_bytes(_U64, "little")
