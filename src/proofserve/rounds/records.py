"""The frozen records that cross a boundary: API to rounds, rounds to engine and outbox."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that decides the numbers of a proof, the nonce apart."""

    scheme: Scheme
    block_hash: str
    public_key: str
    seq_len: int


@dataclass(frozen=True, slots=True)
class RoundSpec:
    """One order to generate proofs until told to stop.

    ``batch_size`` groups the nonces of one engine call; the shape of a forward is the engine's
    own. ``url`` is where ``/generated`` callbacks go, None for none.
    """

    round_id: str
    work: Workload
    block_height: int
    lane: NonceLane
    batch_size: int
    url: str | None


@dataclass(frozen=True, slots=True)
class ProofBatch:
    """What the engine computed for the nonces of one call.

    ``values`` is float32 ``[len(nonces), scheme.width]`` in the order of ``nonces``; every row
    is finite. A requested nonce whose row was not finite is in ``failed`` instead.
    """

    nonces: tuple[int, ...]
    values: NDArray[np.float32]
    failed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Deferred:
    """The engine did not run the call: chat had the engine for ``seconds``. Ask again."""

    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a deployed engine is, as far as requests are checked against it."""

    model_names: tuple[str, ...]
    hidden_size: int
    max_seq_len: int
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """Counters read inside the engine. Durations in seconds, from the engine's start."""

    forwards: int
    busy_s: float
    deferred_s: float
    last_forward_s: float
    longest_chat_wait_s: float
    longest_chat_wait_batches: float
    resume_ms: tuple[float, ...]
    leased_blocks: int
    free_blocks: int
    unfinished_requests: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """One published result: ``vector_b64`` is k float16, little-endian, in base64."""

    nonce: int
    vector_b64: str


@dataclass(frozen=True, slots=True)
class StoredResult:
    """One row of the outbox. ``error`` is set instead of ``value`` for a nonce that failed."""

    seq: int
    round_id: str
    nonce: int
    value: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class OutboxGauges:
    """How full the outbox is: results kept, callbacks waiting, delivered and given up."""

    results: int
    pending: int
    delivered: int
    expired: int
    oldest_pending_s: float
    last_error: str | None
