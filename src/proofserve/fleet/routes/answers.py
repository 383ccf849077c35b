"""The answers of a fleet's own routes for the OpenAPI page; a test compares real ones with them.

Durations in seconds, rates in nonces per second, times in seconds since the epoch.
"""

from typing import Any, Literal

from proofserve.api.response_models import ResponseModel
from proofserve.fleet.records import MemberSource, MemberState, Wish
from proofserve.fleet.verification_records import JobCause, VerdictOutcome
from proofserve.rounds.state import State


class LastVerdictAnswer(ResponseModel):
    """The newest verdict about a member."""

    id: str
    outcome: VerdictOutcome
    reason: str | None
    test: str | None
    nonces: int
    distance: float | None
    threshold: float | None
    at: float


class MemberAnswer(ResponseModel):
    """One member. What it has not said yet is null; ``reason`` is for operators."""

    id: str
    name: str
    url: str
    source: MemberSource
    state: MemberState
    reason: str | None
    wish: Wish
    wish_reason: str | None
    version: str | None
    vllm_version: str | None
    model: str | None
    weights_digest: str | None
    lane: int | None
    nonces_per_second: float
    processed: int
    stored: int
    steps: int | None
    stalled_s: float | None
    last_step_s: float | None
    last_forward_s: float | None
    chat_wait_s: float | None
    paused_reason: str | None
    outbox_pending: int | None
    outbox_age_s: float | None
    clock_offset_s: float | None
    seen_s: float | None
    verdict: LastVerdictAnswer | None


class MembersPage(ResponseModel):
    """Members from the ``offset``-th worst on, of ``of_members``."""

    members: list[MemberAnswer]
    of_members: int
    offset: int


class FleetAnswer(ResponseModel):
    """The fleet and its round: ``members`` by state, ``lanes_used`` of its ``lanes``."""

    state: State
    round_id: str | None
    block_hash: str | None
    block_height: int | None
    public_key: str | None
    scheme: str | None
    started_at: float | None
    ended_at: float | None
    lanes_used: int
    lanes: int
    paused_reason: str | None
    members: dict[str, int]
    processed: int
    found: int
    failed: int
    nonces_per_second: float
    elapsed_s: float


class DistancesAnswer(ResponseModel):
    """``counts[i]`` nonces of the newest ``verdicts`` lie from ``edges[i]`` to ``edges[i + 1]``."""

    edges: list[float]
    counts: list[int]
    verdicts: int
    threshold: float | None


class VerificationAnswer(ResponseModel):
    """Jobs by state, failed ones of the last day; all verdicts by outcome; newest distances."""

    jobs: dict[str, int]
    oldest_job_s: float | None
    verdicts: dict[str, int]
    distances: DistancesAnswer | None


class SnapshotAnswer(MembersPage):
    """All that an operator looks at, as of ``at``."""

    at: float
    fleet: FleetAnswer
    verification: VerificationAnswer


class VerdictAnswer(LastVerdictAnswer):
    """One verdict; ``id`` is that of its job. ``log_evidence`` is a natural logarithm.

    ``alpha`` was its chance to convict an honest member; null in rows of older versions.
    """

    number: int
    member_id: str
    member_name: str
    round_id: str
    lane: int
    cause: JobCause
    log_evidence: float | None
    p_value: float | None
    seconds: float
    worker: str | None
    alpha: float | None


class VerdictPage(ResponseModel):
    """Verdicts from the ``offset``-th newest on."""

    verdicts: list[VerdictAnswer]
    offset: int


class VerdictReportAnswer(VerdictAnswer):
    """A verdict and the report of ``proofserve verify --json``; null for an abstention."""

    report: dict[str, Any] | None


class VerificationJobAnswer(ResponseModel):
    """A verification that waits for a worker; its verdict will have the same id."""

    id: str
    member_id: str
    member_name: str
    queue: str


class JoinAnswer(ResponseModel):
    """What the server is for the fleet; a reason if it takes no part."""

    id: str
    state: MemberState
    reason: str | None


class RemovedAnswer(ResponseModel):
    id: str
    name: str
    removed: Literal[True]


class StoredAnswer(ResponseModel):
    """``duplicate``: a callback with this key was stored before."""

    status: Literal["stored", "duplicate"]
