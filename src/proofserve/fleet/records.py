"""The records of a fleet: members, the desired round, its lanes, and what members said and found.

Times are wall-clock seconds since the epoch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from proofserve.protocol.nonces import MAX_NONCE, NonceLane
from proofserve.rounds.errors import EngineGone, OutboxUnavailable
from proofserve.rounds.records import CommittedRound, RoundSpec, Workload
from proofserve.rounds.state import State
from proofserve.rounds.status import CoreLiveness, EngineGauges, OutboxGauges, RoundStats
from proofserve.wire.records import CommittedRoots, first_problem
from proofserve.wire.status import DeploymentStatus, RoundConfig

_LANE: Final = tuple(each.name for each in fields(NonceLane))
# Members are other programs: no text of theirs may be longer.
_LONGEST_TEXT: Final = 2000


class StoreUnavailable(OutboxUnavailable):
    """The database did not answer, could not store, or is not of this version's fleets.

    Nothing was changed. One case is uncertain: the connection broke while the database committed.
    Every method of the store may therefore be called again with the same arguments.
    """


class NoMemberReady(EngineGone):
    """No member can prove; the text has the reasons. It can once one is ready again."""


class Wish(StrEnum):
    """What the operator wants of a member."""

    ACTIVE = "active"
    """The member takes part in rounds and jobs."""
    CORDONED = "cordoned"
    """The member goes on with what it does, and gets nothing new."""
    DRAINING = "draining"
    """The member's lane is ended, and it gets nothing new."""


class MemberState(StrEnum):
    """What a member is, by the operator's wish and the last look at it."""

    JOINING = "joining"
    """Known, and not yet looked at."""
    READY = "ready"
    """It answers, and is equal to the other members."""
    CORDONED = "cordoned"
    DRAINING = "draining"
    LOST = "lost"
    """It does not answer, or its engine does not step."""
    REFUSED = "refused"
    """It answers, and its model, weights, scheme or clock is not that of the fleet."""


class MemberSource(StrEnum):
    """Where the fleet has the member's address from."""

    LIST = "list"
    DNS = "dns"
    JOINED = "joined"


class MemberStatus(BaseModel):
    """What a fleet reads and keeps of a member's ``NodeStatusResponse``.

    A look stays small, however many winners, lanes or cores a member has.
    """

    status: State
    config: RoundConfig | None
    stats: RoundStats | None
    round_id: str | None
    paused_reason: str | None
    error: str | None
    outbox: OutboxGauges | None
    outbox_error: str | None
    engine: EngineGauges | None
    engine_error: str | None
    liveness: list[CoreLiveness]
    deployment: DeploymentStatus

    @property
    def generates(self) -> bool:
        return self.status is State.GENERATING

    def judges(self, work: Workload) -> bool:
        """Whether ``/validate`` would recompute by the block, scheme and length of ``work``."""
        config = self.config
        if config is None:
            return False
        block = (config.block_hash, config.block_height) == (work.block.hash, work.block.height)
        return block and config.seq_len == work.seq_len and config.scheme == work.scheme.to_wire()

    def has(self, spec: RoundSpec, lane: NonceLane) -> bool:
        """Whether ``spec`` with the nonces of ``lane`` is the configured round."""
        theirs, ours = self.config, RoundConfig.of(replace(spec, lane=lane))
        return theirs is not None and all(
            getattr(theirs, name) == getattr(ours, name)
            for name in ("block_hash", "block_height", "public_key", *_LANE)
        )


def read_status(body: Mapping[str, Any]) -> MemberStatus:
    """Raises ValueError, which names the field, for a body that is not a status."""
    try:
        status = MemberStatus.model_validate(body)
    except ValidationError as error:
        raise ValueError(": ".join(first_problem(error))) from error
    if status.engine is not None:
        # Members with other versions of proofserve may have other bins of forwards.
        status.engine = replace(status.engine, resume_ms=(), cores=(), forward_counts=())
    for name, value in status.model_dump().items():
        _require_bounded(value, name)
    return status


def _require_bounded(value: object, place: str) -> None:
    """Raises ValueError for a long text, and a number that is negative or beyond all bounds."""
    match value:
        case str():
            if len(value) > _LONGEST_TEXT:
                raise ValueError(f"{place}: String should have at most {_LONGEST_TEXT} characters")
            try:
                # JSON can hold half a surrogate pair, which no answer of ours can.
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{place}: Value error, {error}") from None
        case int() | float():
            if not 0 <= value <= MAX_NONCE:
                raise ValueError(f"{place}: Input should be between 0 and {MAX_NONCE}")
        case dict():
            for name, each in value.items():
                _require_bounded(name, place)
                _require_bounded(each, f"{place}.{name}")
        case list() | tuple():
            for number, each in enumerate(value):
                _require_bounded(each, f"{place}.{number}")


@dataclass(frozen=True, slots=True)
class MemberLook:
    """What the last look at a member found.

    ``error`` says why the member did not answer, or what its answer lacks; all that follows it is
    then from an earlier look, or None. ``clock_offset_s`` is the member's clock less the fleet's.
    """

    at: float
    answered: bool
    error: str | None = None
    clock_offset_s: float | None = None
    status: MemberStatus | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A server of the fleet. ``url`` has no slash at its end; ``seen`` is None before any look."""

    id: str
    name: str
    url: str
    source: MemberSource
    wish: Wish
    wish_reason: str | None
    added_at: float
    seen: MemberLook | None = None


@dataclass(frozen=True, slots=True)
class FleetRound:
    """A round of the fleet; ``number`` rises by round.

    ``lanes`` is how many it has, fixed at the start; 0 for a round that only judges claims.
    ``ended_at`` is when it was stopped or replaced, None while it runs or is configured.
    """

    number: int
    spec: RoundSpec
    lanes: int
    opened_at: float
    ended_at: float | None

    @property
    def id(self) -> str:
        return self.spec.round_id

    def nonces_of(self, lane: int) -> NonceLane:
        """The nonces of lane number ``lane`` = 0 .. ``lanes`` - 1: disjoint, together all.

        A member is started with these four numbers. Raises ValueError for a round without lanes
        and for a number outside the range.
        """
        own = self.spec.lane
        if own is None or not 0 <= lane < self.lanes:
            raise ValueError(f"round {self.id} has lanes 0..{self.lanes - 1}, and no lane {lane}")
        return part_of(own, lane, self.lanes)


def part_of(own: NonceLane, lane: int, lanes: int) -> NonceLane:
    """The part number ``lane`` of ``own``, which is divided into ``lanes``."""
    group_id, n_groups = own.group_id + own.n_groups * lane, own.n_groups * lanes
    return NonceLane(own.node_id, own.node_count, group_id, n_groups)


@dataclass(frozen=True, slots=True)
class MemberRound(CommittedRound):
    """A member's round with roots, for a lane of the fleet's round ``of`` or a part of one.

    The member gave it its ``round_id``, or one of its members if it is a fleet.
    """

    member_id: str
    of: FleetRound


@dataclass(frozen=True, slots=True)
class DesiredState:
    """What the fleet shall do: its state as a node, and the configured round, as on a node."""

    state: State = State.IDLE
    round: FleetRound | None = None

    @property
    def configured(self) -> RoundSpec | None:
        return self.round.spec if self.round is not None else None


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane that was given to a member, once and for ever, and what was stored of it.

    ``member_round_id`` is the member's own id of its round, None until its start is known.
    ``weights_digest`` and ``model``, its name, are what the fleet served when the lane was given,
    whatever the member says; None if not known.
    ``batches`` callbacks are stored, and ``stored`` nonces with a finding or under a root. The
    policy of verification last took a sample at ``sampled_at``, up to the batch ``sampled_batch``,
    when ``sampled_stored`` nonces were stored.
    """

    round_id: str
    lane: int
    member_id: str
    given_at: float
    member_round_id: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    end_reason: str | None = None
    weights_digest: str | None = None
    model: str | None = None
    batches: int = 0
    stored: int = 0
    last_stored_at: float | None = None
    sampled_at: float | None = None
    sampled_batch: int = 0
    sampled_stored: int = 0


@dataclass(frozen=True, slots=True)
class FleetView:
    """One consistent look at the database: members by name, the desired round and its lanes.

    ``queued_nonces`` are those of the stored jobs of /generate that wait or run.
    """

    at: float
    members: tuple[Member, ...]
    desired: DesiredState
    lanes: tuple[Lane, ...]
    queued_nonces: int = 0


class BatchKind(StrEnum):
    """What a stored callback holds."""

    VECTORS = "vectors"
    WINNERS = "winners"
    ROOTS = "roots"


@dataclass(frozen=True, slots=True, eq=False)
class MemberFindings:
    """What one callback of a member holds: ``nonces`` int64 [n], and ``values`` by its ``kind``.

    Vectors are float16 [n, k] and finite, the distances of winners float64 [n, 1], both
    little-endian. Of roots, ``nonces`` has the first nonce of each root's batch, and there are no
    values: [n, 0]. ``roots`` is then the callback, in the same order, and ``body`` its JSON; its
    round is of the member's lane or, of a member that is a fleet, of a part of it.
    """

    kind: BatchKind
    nonces: NDArray[np.int64]
    values: NDArray[Any]
    roots: CommittedRoots | None = None
    body: Mapping[str, Any] | None = None
