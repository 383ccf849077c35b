"""Orders that the lab sends to a node, the answers that it reads back, and the vectors in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol import (
    ARTIFACT_K_DIM,
    DEFAULT_SCHEME,
    SEQ_LEN,
    SKETCHES,
    TWINS,
    default_k_dim,
)
from proofserve.protocol.codec import decode, encode
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.status import EngineGauges

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


def work_of_scheme(scheme: str | None, model: str, seq_len: int, batch_size: int = 32) -> Work:
    k_dim = default_k_dim(scheme or DEFAULT_SCHEME)
    return Work(model, seq_len=seq_len, batch_size=batch_size, k_dim=k_dim, scheme=scheme)


AnyWork = Work | DistanceWork


@dataclass(frozen=True, slots=True)
class Judgement:
    """A node's verdict on claimed distances, computed again in the order of the claims."""

    computed_distances: tuple[float, ...]
    n_invalid: int
    probability_honest: float
    fraud_detected: bool


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """``GET /status``: counts of the current or last round, and the engine's own counters.

    Of the ``processed`` nonces ``found`` were stored: all of them in a round of the artifact
    protocol, the winners in one of the distance protocol. ``rate``: nonces per second since the
    round began. ``of_lane`` has the processed nonces of each lane of a fleet; a node has one lane.
    """

    state: str
    round_id: str | None
    processed: int
    found: int
    failed: int
    rate: float
    engine: EngineGauges | None
    lanes: int = 1
    of_lane: Mapping[int, int] | None = None

    def tried(self) -> list[int]:
        """The nonces with a result, if the round's lane holds every nonce."""
        counts = {0: self.processed} if self.of_lane is None else self.of_lane
        return sorted(
            lane + self.lanes * index for lane, count in counts.items() for index in range(count)
        )

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> "NodeStatus":
        """Read the answer's JSON. A node without a round has no stats."""
        stats = body["stats"] or {}
        gauges = body.get("engine")
        lanes = body.get("lanes") or {"total": 1, "processed": None}
        of_lane = lanes["processed"]
        return cls(
            state=body["status"],
            round_id=body.get("round_id"),
            processed=stats.get("total_processed", 0),
            found=stats.get("total_found", 0),
            failed=stats.get("failed", 0),
            rate=stats.get("nonces_per_second", 0.0),
            engine=record_of(EngineGauges, gauges) if gauges else None,
            lanes=lanes["total"],
            of_lane=None if of_lane is None else {int(n): count for n, count in of_lane.items()},
        )


@dataclass(frozen=True, slots=True)
class BareSpeed:
    """The speed of forwards back to back inside the engine, which no round can exceed."""

    nonces_per_second: float
    seconds_per_forward: float
    sequences: int


def record_of(kind: type[R], body: Mapping[str, Any]) -> R:
    """A dataclass of a JSON object. A newer node may send more, and an older one less."""
    known = {name: body[name] for name in signature(kind).parameters if name in body}
    lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    return kind(**{**known, **lists})


def vectors_of(claims: Sequence[Claim], k_dim: int) -> Mapping[int, NDArray[np.float32]]:
    """The vector of each nonce. Raises MalformedVector for a vector without k finite numbers."""
    return {claim.nonce: decode(claim.vector_b64, k_dim) for claim in claims}


def distances(some: Sequence[Claim], others: Sequence[Claim], k_dim: int) -> list[float]:
    ours, theirs = vectors_of(some, k_dim), vectors_of(others, k_dim)
    return [float(np.linalg.norm(ours[nonce] - theirs[nonce])) for nonce in ours]


def tampered(claims: Sequence[Claim], k_dim: int, every: int) -> list[Claim]:
    """Every ``every``-th vector with its first two values swapped: still finite and of length 1."""
    made = list(claims)
    for index in range(0, len(made), every):
        vector = decode(made[index].vector_b64, k_dim)
        vector[[0, 1]] = vector[[1, 0]]
        made[index] = Claim(made[index].nonce, encode(vector[np.newaxis])[0])
    return made
