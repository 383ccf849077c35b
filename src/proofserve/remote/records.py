"""Orders to a node, what is read back of its verdicts, and the vectors in its answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol import ARTIFACT_K_DIM, SEQ_LEN, SKETCHES, TWINS
from proofserve.protocol.codec import decode
from proofserve.protocol.verdict.comparison import Claim

R = TypeVar("R")

# Of orders that do not say one.
BLOCK_HEIGHT: Final = 1


@dataclass(frozen=True, slots=True)
class ProofOrder:
    """Of both protocols. ``seq_len`` counts tokens; results of a round go to ``callback_url``."""

    model: str
    block_hash: str = "lab-block"
    public_key: str = "lab-key"
    seq_len: int = SEQ_LEN
    batch_size: int = 32
    callback_url: str | None = None
    block_height: int = BLOCK_HEIGHT

    @property
    def sequences_per_nonce(self) -> int:
        """How many sequences of ``seq_len`` tokens the model reads for a nonce."""
        return 1

    def common_fields(self, callback: str) -> dict[str, Any]:
        """The protocols name the URL for callbacks differently. The network has this one node."""
        fields = {
            "block_hash": self.block_hash,
            "block_height": self.block_height,
            "public_key": self.public_key,
            "node_id": 0,
            "node_count": 1,
            "batch_size": self.batch_size,
        }
        return fields if self.callback_url is None else {**fields, callback: self.callback_url}


@dataclass(frozen=True, slots=True)
class Work(ProofOrder):
    """An order of the artifact protocol. ``k_dim`` is the scheme's own number of values.

    A node refuses an order whose ``scheme`` it does not prove; None is the node's default.
    """

    protocol: ClassVar = "artifact"
    k_dim: int = ARTIFACT_K_DIM
    scheme: str | None = None
    stronger_rng: bool = False

    @property
    def sequences_per_nonce(self) -> int:
        return TWINS if self.scheme in SKETCHES else 1

    @property
    def width(self) -> int:
        return self.sequences_per_nonce * self.k_dim

    @property
    def params(self) -> dict[str, Any]:
        return {"model": self.model, "seq_len": self.seq_len, "k_dim": self.k_dim}

    @property
    def measure_fields(self) -> dict[str, Any]:
        # Other implementations do not know the scheme, so a request has it only where needed.
        scheme = {} if self.scheme is None else {"scheme": self.scheme}
        return {"params": self.params, **scheme}

    @property
    def body(self) -> dict[str, Any]:
        stronger = {"poc_stronger_rng": True} if self.stronger_rng else {}
        return {**self.common_fields("url"), **self.measure_fields, **stronger}


@dataclass(frozen=True, slots=True)
class DistanceWork(ProofOrder):
    """An order of the distance protocol. With a ``r_target`` of 2 every nonce wins."""

    protocol: ClassVar = "distance"
    r_target: float = 2.0
    sign_flips: bool = True
    layer_hooks: bool = False

    @property
    def measure_fields(self) -> dict[str, Any]:
        return {"seq_len": self.seq_len}

    @property
    def body(self) -> dict[str, Any]:
        return {
            **self.common_fields("callback_url"),
            "seq_len": self.seq_len,
            "r_target": self.r_target,
            "use_sign_flips": self.sign_flips,
            "use_layer_hooks": self.layer_hooks,
        }


AnyWork = Work | DistanceWork


@dataclass(frozen=True, slots=True)
class Judgement:
    """A node's verdict on claimed distances, computed again in the order of the claims."""

    computed_distances: tuple[float, ...]
    n_invalid: int
    probability_honest: float
    fraud_detected: bool


def record_of(kind: type[R], body: Mapping[str, Any]) -> R:
    """A dataclass of a JSON object. A newer node may send more, and an older one less."""
    known = {name: body[name] for name in signature(kind).parameters if name in body}
    lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    return kind(**{**known, **lists})


def vectors_of(claims: Sequence[Claim], k_dim: int) -> Mapping[int, NDArray[np.float32]]:
    """The vector of each nonce. Raises MalformedVector for a vector without k finite numbers."""
    return {claim.nonce: decode(claim.vector_b64, k_dim) for claim in claims}
