"""The frozen records that cross a boundary: API to rounds, rounds to engine and outbox."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.verdict.comparison import Claim

if TYPE_CHECKING:
    # The receiver reads these records, and must not wait for torch and scipy.
    from proofserve.protocol.scheme import ModelFacts, Scheme

# A p-value below this is fraud; the default of both protocols.
FRAUD_THRESHOLD = 0.01


@dataclass(frozen=True, slots=True)
class Workload:
    """All inputs of a proof except the nonce."""

    scheme: "Scheme"
    block: Block
    public_key: str
    seq_len: int


@dataclass(frozen=True, slots=True)
class Target:
    """Which nonces of a distance round win, and the p-value below which claims are fraud."""

    r_target: float
    fraud_threshold: float = FRAUD_THRESHOLD


@dataclass(frozen=True, slots=True)
class RoundSpec:
    """What a round computes: proofs until it is stopped, or verdicts about claims.

    ``batch_size`` is the number of nonces in one engine call; the engine decides the shape of a
    forward. ``url`` is where callbacks go; None sends none. A round of the distance protocol has a
    ``target``. A round that only judges claims needs no ``lane``. A round of artifacts that
    ``commits_roots`` publishes the roots of its batches instead of vectors.
    """

    round_id: str
    work: Workload
    lane: NonceLane | None
    batch_size: int
    url: str | None
    target: Target | None = None
    commits_roots: bool = False


@dataclass(frozen=True, slots=True)
class CommittedRound:
    """A round that publishes roots: those of the first ``next_index`` nonces of its lane so far."""

    round_id: str
    lane: NonceLane
    next_index: int


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
    """The engine did not run the call because chat used it for ``seconds``. Ask again."""

    reason: str
    seconds: float


# What ``kernels`` says of a server's operations, as "ops".
VLLM_OPS, PYTORCH_OPS = "vLLM", "PyTorch"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """``kernels`` says on what the model runs: dtypes, ranks and processor, as far as known.

    ``experts_obstacle`` says why a block cannot choose the model's experts; None if it can.
    """

    model_names: tuple[str, ...]
    facts: "ModelFacts"
    max_seq_len: int
    versions: Mapping[str, str]
    kernels: Mapping[str, str] = field(default_factory=dict)
    experts_obstacle: str | None = None


@dataclass(frozen=True, slots=True)
class Winner:
    """One published result of a distance round, a float32 widened to a Python float."""

    nonce: int
    distance: float


# What a round publishes: a vector (k float16, little-endian, in base64), or a winner.
Finding = Claim | Winner


@dataclass(frozen=True, slots=True)
class StoredResult:
    """One row of the outbox: an artifact's text, a winner's distance, or the nonce's error."""

    seq: int
    round_id: str
    nonce: int
    value: str | None = None
    error: str | None = None
    distance: float | None = None


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """The progress of a round: the lane's next index, and the stored findings and failures."""

    next_index: int = 0
    found: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class StatTest:
    """When a comparison counts as fraud. ``dist_threshold`` is an L2 distance of unit vectors."""

    dist_threshold: float = 0.02
    p_mismatch: float = 0.001
    fraud_threshold: float = FRAUD_THRESHOLD


@dataclass(frozen=True, slots=True)
class Job:
    """A request to prove a list of nonces, or to judge ``claims`` about them by ``test``.

    ``batch_size`` is the number of nonces in one engine call. ``url`` is where the completion
    callback goes; None sends none.
    """

    work: Workload
    nonces: tuple[int, ...]
    batch_size: int
    node_id: int
    url: str | None = None
    claims: tuple[Claim, ...] | None = None
    test: StatTest = field(default_factory=StatTest)


@dataclass(frozen=True, slots=True)
class Proofs:
    """The result of a job without claims; ``failed`` maps a nonce to its error."""

    artifacts: tuple[Claim, ...]
    failed: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a job with claims: every nonce was recomputed and compared with its claim.

    ``p_value`` is that of the binomial test.
    """

    n_total: int
    n_mismatch: int
    mismatch_nonces: tuple[int, ...]
    p_value: float
    fraud_detected: bool


Outcome = Proofs | Verdict


@dataclass(frozen=True, slots=True)
class CompletedJob:
    request_id: str
    job: Job
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class DistanceClaims:
    """A prover's winners: ``distances[i]`` is claimed for ``nonces[i]``, and may be any float.

    ``node_id`` is the prover's number; it is only reported.
    """

    block: Block
    public_key: str
    node_id: int
    nonces: tuple[int, ...]
    distances: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DistanceVerdict:
    """Claims as judged by ``target``: ``computed`` and ``valid`` in the order of their nonces."""

    claims: DistanceClaims
    target: Target
    computed: tuple[float, ...]
    valid: tuple[bool, ...]
    probability_honest: float
    fraud_detected: bool

    @property
    def n_invalid(self) -> int:
        return self.valid.count(False)


class JobState(StrEnum):
    """The state of a job. A job that waits for other jobs or for a round to end is queued."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as a client sees it: ``completed`` has its outcome, ``error`` says why it failed."""

    request_id: str
    state: JobState
    completed: CompletedJob | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a node's round, of its jobs, and of its engine's answers.

    Of a round: ``depth`` calls of each engine core are in flight at a time. Several cores prove at
    most ``max_ahead_nonces`` from the oldest nonce without a result on, which a core may hold up
    while it serves chat. At most ``max_unrecorded`` finished batches wait for the outbox; then the
    round pauses its engine calls. ``fault_backoff_s`` holds the pauses after the first, second, ...
    fault of the same batch; fault number ``max_faults`` ends the round. A stopped round waits at
    most ``flush_timeout_s`` for its engine, and as long for its outbox. A running round logs one
    line every ``log_interval_s``.

    Of jobs: the queue, how long chat may delay a chunk, and how long results are kept;
    ``max_kept_jobs`` and ``max_kept_nonces`` bound all kept results together.

    Of the engine: its first answer, and its choice of a round's forwards, take ``engine_answer_s``
    at most. After that one that gives no gauges within ``engine_busy_s`` is busy.
    """

    depth: int = 2
    max_ahead_nonces: int = 65_536
    max_unrecorded: int = 8
    record_retry_s: float = 1.0
    fault_backoff_s: tuple[float, ...] = (1.0, 2.0, 4.0)
    max_faults: int = 3
    flush_timeout_s: float = 10.0
    log_interval_s: float = 5.0
    max_queued_nonces: int = 100_000
    chunk_timeout_s: float = 60.0
    result_ttl_s: float = 300.0
    max_kept_jobs: int = 10_000
    max_kept_nonces: int = 1_000_000
    callback_retry_s: float = 1.0
    engine_answer_s: float = 5.0
    engine_busy_s: float = 0.5
