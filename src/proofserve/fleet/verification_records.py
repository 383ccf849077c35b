"""The frozen records of verification: rules, jobs, samples and verdicts.

Times are wall-clock seconds since the epoch, durations seconds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from proofserve.api.response_models import ResponseModel
from proofserve.fleet.records import FleetRound, Member

DAY_S: Final = 86_400.0
# Of so many of a member's newest verdicts, without abstentions, the unproved ones are counted.
RECENT: Final = 20


class AfterConviction(StrEnum):
    """What follows when a member is convicted. Its rows say so in every case."""

    MARK = "mark"
    """Nothing more: operators see the verdict."""
    CORDON = "cordon"
    """The member gets nothing new; the reason names the verdict."""
    CALLBACK = "callback"
    """The verdict is posted to ``callback_url``, signed as callbacks to the network."""


class JudgedBy(StrEnum):
    WEIGHTS = "weights"
    """A worker recomputes with the checkpoint."""
    MEMBERS = "members"
    """Other members compute the same nonces once the round has ended."""


class JobCause(StrEnum):
    POLICY = "policy"
    OPERATOR = "operator"


class JobPhase(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class VerdictOutcome(StrEnum):
    HONEST = "honest"
    FRAUD = "fraud"
    UNDECIDED = "undecided"
    """The tests could not decide on this sample."""
    UNPROVED = "unproved"
    """The member did not show a part of what it owed: the reason says why."""
    ABSTAINED = "abstained"
    """Nothing was judged: the reason says what the fleet was missing."""


@dataclass(frozen=True, slots=True)
class VerificationRule:
    """How one member is judged. A job keeps the rule of its time.

    The options of ``proofserve verify`` of these names: ``tests``, ``beta``, ``share``,
    ``dist_threshold``, ``p_mismatch``; ``alpha_per_day`` is spent by ``share_of_alpha``.
    ``calibration`` is the digest of its content in the store. A job is tried again after a fault up
    to ``attempts`` times in all, and ends after ``timeout_s``; a smaller ``priority`` goes first.
    A member of whose newest ``RECENT`` verdicts more than ``unproved_share`` are unproved is
    cordoned.
    """

    nonces: int
    by: JudgedBy = JudgedBy.WEIGHTS
    every_s: float | None = None
    every_nonces: int | None = None
    tests: tuple[str, ...] = ()
    alpha_per_day: float = 1e-6
    beta: float = 1e-3
    share: float | None = None
    dist_threshold: float | None = None
    p_mismatch: float | None = None
    calibration: str | None = None
    conviction: AfterConviction = AfterConviction.MARK
    callback_url: str | None = None
    unproved_share: float = 0.25
    attempts: int = 3
    timeout_s: float = 3600.0
    priority: int = 10

    @property
    def planned_per_day(self) -> int:
        """How many samples of a lane its times allow in a day; 0 if only nonces decide."""
        return math.ceil(DAY_S / self.every_s) if self.every_s else 0


@dataclass(frozen=True, slots=True)
class VerificationJob:
    """A sample of a lane to recompute, from the batches ``after_batch`` < n <= ``through_batch``.

    ``seed`` draws the nonces; it does not exist before the artifacts are stored. Only workers that
    have the checkpoint of ``weights_digest``, or without one ``model``, read ``queue``. The store
    sets ``alpha_share``, of the rule's alpha of a day, when it stores the job.
    """

    id: str
    member_id: str
    round_number: int
    lane: int
    cause: JobCause
    queue: str
    rule: VerificationRule
    weights_digest: str | None
    model: str | None
    seed: str
    after_batch: int
    through_batch: int
    asked_at: float
    state: JobPhase = JobPhase.QUEUED
    attempts: int = 0
    alpha_share: float = 0.0

    @property
    def alpha(self) -> float:
        """The chance that the verdict convicts an honest member."""
        return self.alpha_share * self.rule.alpha_per_day


@dataclass(frozen=True, slots=True, eq=False)
class StoredSample:
    """The drawn artifacts: ``nonces`` int64 [n], ``vectors`` float16 [n, width]; ``of`` how many.

    ``missing`` more were drawn, and have not come, though later nonces of the lane have. Of a lane
    with roots there are none; then ``committed`` has the bodies of its callbacks.
    """

    nonces: NDArray[np.int64]
    vectors: NDArray[np.float16]
    of: int
    committed: tuple[Mapping[str, Any], ...] = ()
    missing: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class VerificationTask:
    """All that a worker needs for a job. ``calibration`` is the content of its file.

    ``others`` are the other members that take part, where members judge each other.
    """

    job: VerificationJob
    member: Member
    round: FleetRound
    sample: StoredSample
    calibration: str | None
    others: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class JobFinding:
    """What a worker found. ``distances`` are those of the recomputed nonces, L2 between vectors.

    ``distance`` is their median, ``threshold`` what honest distances rarely exceed.
    ``log_evidence`` is the natural logarithm of the test's e-value or likelihood ratio. An
    abstention has only ``outcome``, ``reason`` and ``seconds``.
    """

    outcome: VerdictOutcome
    seconds: float
    reason: str | None = None
    test: str | None = None
    nonces: int = 0
    distance: float | None = None
    threshold: float | None = None
    log_evidence: float | None = None
    p_value: float | None = None
    distances: tuple[float, ...] = ()
    report: Mapping[str, Any] | None = None


class MemberVerdict(ResponseModel, frozen=True):
    """A verdict, as it is stored and shown; ``id`` is that of its job.

    ``log_evidence`` is a natural logarithm, ``alpha`` was its chance to convict an honest member.
    ``unproved`` counts the unproved ones among the member's ``RECENT`` newest up to this one.
    """

    number: int
    id: str
    member_id: str
    member_name: str
    round_id: str
    lane: int
    cause: JobCause
    outcome: VerdictOutcome
    reason: str | None
    test: str | None
    nonces: int
    distance: float | None
    threshold: float | None
    log_evidence: float | None
    p_value: float | None
    at: float
    seconds: float
    worker: str | None
    alpha: float | None
    unproved: int


@dataclass(frozen=True, slots=True)
class DistanceCounts:
    """A histogram: ``counts[i]`` nonces from ``edges[i]`` to ``edges[i + 1]``, of ``verdicts``."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    verdicts: int
    threshold: float | None


@dataclass(frozen=True, slots=True)
class VerificationView:
    """``last`` has each member's newest verdict, ``jobs`` and ``outcomes`` count all rows.

    ``oldest_asked_at`` is of the jobs that wait or run.
    """

    last: Mapping[str, MemberVerdict] = field(default_factory=dict)
    jobs: Mapping[JobPhase, int] = field(default_factory=dict)
    outcomes: Mapping[VerdictOutcome, int] = field(default_factory=dict)
    oldest_asked_at: float | None = None
    distances: DistanceCounts | None = None

    def convicted(self, member_id: str) -> bool:
        """Whether the newest verdict about the member is fraud."""
        last = self.last.get(member_id)
        return last is not None and last.outcome is VerdictOutcome.FRAUD
