"""A receipt: what a node states about one chat answer, and the bytes that it signs."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.errors import ProtocolError

SCHEME: Final = "receipt-v1"
# Begins what is hashed: other schemes of ours never hash the same bytes.
VERSION = b"proofserve receipt-v1\0"
# Limits of ``k_dim``.
LEAST, MOST = 16, 64


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of an answer were drawn; the defaults change nothing.

    A ``temperature`` of 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep every token. ``restricted``
    says that the request changed or excluded tokens otherwise (a grammar, a bias of logits, words
    that are not allowed, a least length); then the tokens cannot be tested.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    restricted: bool = False


@dataclass(frozen=True, slots=True)
class Receipt:
    """``sketches`` are float16 LE, [output_tokens, k_dim], one row for each token of the answer.

    ``choice`` is the index among a request's answers, ``adapter`` the name of a LoRA adapter.
    Hashes and the digest are in hexadecimal; ``created_ms`` is Unix time in milliseconds, when the
    answer ended. Raises ProtocolError, naming the field, if the sizes do not fit each other.
    """

    response_id: str
    choice: int
    model: str
    adapter: str | None
    weights_digest: str
    sampling: Sampling
    prompt_tokens: int
    prompt_sha256: str
    output_tokens: int
    output_sha256: str
    sketch_key: str
    k_dim: int
    sketches: bytes
    finish_reason: str
    versions: tuple[tuple[str, str], ...]
    created_ms: int

    def __post_init__(self) -> None:
        needed = 2 * self.output_tokens * self.k_dim
        if len(self.sketches) != needed:
            raise ProtocolError("sketches", f"{len(self.sketches)} bytes where {needed} are needed")

    @property
    def vectors(self) -> NDArray[np.float32]:
        """float32 [output_tokens, k_dim]; not finite where the node's state was not."""
        flat = np.frombuffer(self.sketches, "<f2").astype(np.float32)
        return flat.reshape(self.output_tokens, self.k_dim)

    def to_wire(self) -> dict[str, Any]:
        """The fields as JSON has them, with ``scheme``."""
        fields = asdict(self)
        fields["sketches"] = base64.b64encode(self.sketches).decode("ascii")
        fields["versions"] = dict(self.versions)
        return {"scheme": SCHEME, **fields}

    @property
    def digest(self) -> bytes:
        """SHA-256 of version and ``to_wire`` as ASCII JSON, keys in order, no spaces: 32 bytes."""
        text = json.dumps(self.to_wire(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(VERSION + text.encode("ascii")).digest()


def token_hash(ids: Sequence[int]) -> str:
    """SHA-256 over the token ids as u32 LE, in hexadecimal."""
    return hashlib.sha256(np.array(ids, dtype="<u4").tobytes()).hexdigest()
