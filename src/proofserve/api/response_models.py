"""What the routes answer, and how the OpenAPI page describes them and their refusals."""

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from proofserve.rounds.state import State
from proofserve.wire.records import ArtifactRecord, FailedNonce, OrLeftOut, VectorEncoding
from proofserve.wire.signed import SignedEntryRecord, SignedReceiptRecord
from proofserve.wire.status import PowStatus

S = TypeVar("S")


class ResponseModel(BaseModel, extra="forbid"):
    pass


class StateOnly(ResponseModel):
    """A round in the form of the artifact protocol."""

    status: State


class StoppedPowStatus(PowStatus):
    """Both forms, because the node cannot know the protocol of the client."""

    status: State


class RoundAnswer(ResponseModel, Generic[S]):
    """A call about a round succeeded; its status has the form of the round's protocol."""

    status: Literal["OK"]
    pow_status: S
    warning: OrLeftOut[str] = None


PowAnswer = RoundAnswer[PowStatus]
StartAnswer = RoundAnswer[PowStatus | StateOnly]
# The round has ended and queued jobs are cancelled.
StopAnswer = RoundAnswer[StoppedPowStatus | StateOnly]


class JudgeAnswer(ResponseModel):
    """The verdict about claimed winners, with distances in the order of the claims."""

    status: Literal["OK"]
    fraud_detected: bool
    computed_distances: list[float]
    n_invalid: int
    probability_honest: float


class ResultRow(ResponseModel):
    """One nonce: its artifact, its distance if it won, or its error."""

    seq: int
    round_id: str
    nonce: int
    vector_b64: OrLeftOut[str] = None
    dist: OrLeftOut[float] = None
    error: OrLeftOut[str] = None


class ResultsPage(ResponseModel):
    """Stored results; go on with ``after`` = ``next_after``."""

    results: list[ResultRow]
    next_after: int


class ReceiptKeys(ResponseModel):
    """The key that signs receipts and their log, and how their sketches are made."""

    public_key: str
    sketch_key: str
    k_dim: int


class Versions(ResponseModel):
    vllm_version: str | None
    poc_validation_inference: bool
    weights_digest: str | None
    versions: dict[str, str]
    kernels: dict[str, str]
    public_key: str | None
    receipts: ReceiptKeys | None


class JobAnswer(ResponseModel):
    """A job: artifacts or a verdict once it is completed, ``error`` once it has failed.

    Block and key say for which work it is. ``p_value`` is that of the binomial test.
    """

    status: Literal["queued", "running", "completed", "failed", "cancelled"]
    request_id: str
    queued_count: OrLeftOut[int] = None
    block_hash: OrLeftOut[str] = None
    block_height: OrLeftOut[int] = None
    public_key: OrLeftOut[str] = None
    artifacts: OrLeftOut[list[ArtifactRecord]] = None
    encoding: OrLeftOut[VectorEncoding] = None
    failed: OrLeftOut[list[FailedNonce]] = None
    n_total: OrLeftOut[int] = None
    n_mismatch: OrLeftOut[int] = None
    mismatch_nonces: OrLeftOut[list[int]] = None
    p_value: OrLeftOut[float] = None
    fraud_detected: OrLeftOut[bool] = None
    error: OrLeftOut[str] = None
    warning: OrLeftOut[str] = None


class OpeningModel(ResponseModel, ArtifactRecord):
    """A nonce of a committed round: ``index`` is its place in the lane, the rest its batch.

    Root and path are in base64; the path is one text of all hashes, from the leaf upwards.
    """

    index: int
    first_index: int
    count: int
    root: str
    path: str


class OpeningsAnswer(ResponseModel):
    """The vectors asked for. The round has roots for its first ``committed`` nonces."""

    round_id: str
    committed: int
    openings: list[OpeningModel]


class MeasureAnswer(ResponseModel):
    """Speed of bare forwards, each of so many ``sequences``."""

    nonces_per_second: float
    seconds_per_forward: float
    sequences: int


class ReceiptsAnswer(ResponseModel):
    """One receipt for each choice of the response, in order."""

    receipts: list[SignedReceiptRecord]


class LogPage(ResponseModel):
    """Entries of the log; go on with ``after`` = ``next_after``."""

    public_key: str
    entries: list[SignedEntryRecord]
    next_after: int


class HealthAnswer(ResponseModel):
    """Everything that was checked works."""

    status: Literal["ok"]


class DeepAnswer(HealthAnswer):
    """A forward ran, and its numbers were finite. ``seconds`` includes waiting for chat."""

    seconds: float


class Problem(ResponseModel):
    """Why a call was refused. With 422, a list with the location of each wrong field."""

    detail: Any


_REASONS = {
    400: "the node has no round for this call, the claims are about other nonces, or the body came"
    " with an Upgrade",
    401: "the server needs a key, and the request has none of its keys",
    403: "the key's role does not permit this, or there are no keys and the client is elsewhere",
    404: "unknown or expired",
    410: "the vectors or the receipt are deleted, some days after they were published",
    409: "not in this state, or for another deployment or block",
    425: "the receipt is not in the log yet; Retry-After says when to try again",
    422: "a field is wrong; its name is in the detail",
    413: "the body is larger than this server reads",
    429: "the queue is full, or a limit is reached; Retry-After says when to try again",
    503: "proofs are off, the engine or the outbox does not work, or the server is shutting down",
}


def documented(answer: type[BaseModel], *refusals: int, needs_key: bool = True) -> dict[str, Any]:
    """Arguments of a route that answers ``answer`` or one of ``refusals``.

    Every route may answer 400, 413 and 429, and one that ``needs_key`` 401 and 403.
    """
    return {"response_model": answer, "responses": refused(*refusals, needs_key=needs_key)}


def refused(*refusals: int, needs_key: bool = True) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route as FastAPI documents them, with those that every route may give."""
    codes = (400, *((401, 403) if needs_key else ()), 413, 429, *refusals)
    return {code: {"model": Problem, "description": _REASONS[code]} for code in codes}
