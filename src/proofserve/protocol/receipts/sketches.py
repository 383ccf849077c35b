"""A short projection of the state behind each output token of a chat.

The state is the output of the final norm that went into the token's logits. Its direction in
``k_dim`` random dimensions is enough to compare it; the final norm nearly fixes its length.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import LEAST, MOST, VERSION
from proofserve.protocol.shake import signs, stream, u64


@dataclass(frozen=True, slots=True)
class ReceiptScheme:
    """``key`` is the text that the operator publishes for a day, so rows are not known before it.

    ``weights_digest`` is in hexadecimal. Raises ProtocolError for ``k_dim`` outside 16..64, and for
    a digest that is not 32 bytes.
    """

    key: str
    weights_digest: str
    k_dim: int = 32

    def __post_init__(self) -> None:
        if not LEAST <= self.k_dim <= MOST:
            raise ProtocolError("k_dim", f"{self.k_dim} is outside {LEAST}..{MOST}")
        try:
            size = len(bytes.fromhex(self.weights_digest))
        except ValueError as error:
            raise ProtocolError("weights_digest", "is not hexadecimal") from error
        if size != 32:
            raise ProtocolError("weights_digest", f"{size} bytes where 32 are needed")

    def rows(self, hidden_size: int, device: torch.device) -> Tensor:
        """The projection float32 [k_dim, hidden_size] of +-1 / sqrt(k_dim)."""
        count = self.k_dim * hidden_size
        digest = bytes.fromhex(self.weights_digest)
        fields = (b"rows", self.key.encode(), digest, u64(self.k_dim))
        drawn = np.frombuffer(stream(VERSION, fields, math.ceil(count / 8)), np.uint8)
        made = torch.from_numpy(signs(drawn, count).reshape(self.k_dim, hidden_size))
        return made.to(device) / math.sqrt(self.k_dim)


def sketches(states: Tensor, rows: Tensor) -> Tensor:
    """float32 [tokens, k_dim] of ``states`` [tokens, hidden_size], by ``ReceiptScheme.rows``.

    A state that is not finite, or whose norm is not, gives a row of NaN.
    """
    exact = states.to(torch.float32)
    norms = torch.linalg.vector_norm(exact, dim=1, keepdim=True)
    # Dividing by an infinite norm would turn a broken state into zeros, which look valid.
    made: Tensor = (exact / norms.masked_fill(~norms.isfinite(), torch.nan)) @ rows.T
    return made
