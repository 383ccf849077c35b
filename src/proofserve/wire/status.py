"""The answer of ``GET /status``: one class for the node, its page, and all that read it.

Readers ignore fields that newer nodes add. Rates are in nonces per second, durations in seconds.
"""

from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel

from proofserve.rounds.records import RoundSpec
from proofserve.rounds.state import State
from proofserve.rounds.status import (
    CoreLiveness,
    CoreStatus,
    EngineGauges,
    FleetMembership,
    LaneUse,
    OutboxGauges,
    QueueGauges,
    ReceiptGauges,
    RoundStats,
)
from proofserve.wire.records import OrLeftOut


class PowStatus(BaseModel):
    """A round in the form of the distance protocol.

    The lists hold the newest winners, oldest first, or null while the outbox cannot be read.
    Rates in nonces per second.
    """

    state: State
    valid_nonces: list[int] | None
    valid_distances: list[float] | None
    total_checked: int
    total_valid: int
    elapsed_seconds: float
    rate_per_second: float
    r_target: float | None


class RoundConfig(BaseModel):
    """The configured round. A round that only judges claims has no lane.

    ``scheme`` is a name, in the distance protocol an object. Only the artifact protocol has
    ``k_dim`` and ``commit``, only the distance protocol ``r_target`` and ``fraud_threshold``.
    """

    block_hash: str
    block_height: int
    public_key: str
    node_id: int | None
    node_count: int | None
    group_id: int | None
    n_groups: int | None
    seq_len: int
    k_dim: OrLeftOut[int] = None
    r_target: OrLeftOut[float] = None
    fraud_threshold: OrLeftOut[float] = None
    scheme: str | dict[str, str | int | bool]
    commit: OrLeftOut[Literal["vectors", "roots"]] = None

    @classmethod
    def of(cls, spec: RoundSpec) -> "RoundConfig":
        work, lane, target = spec.work, spec.lane, spec.target
        scheme = work.scheme.to_wire()
        if target is None:
            own: dict[str, Any] = {"k_dim": scheme["k_dim"], "scheme": scheme["name"]}
            own["commit"] = "roots" if spec.commits_roots else "vectors"
        else:
            own = {**asdict(target), "scheme": scheme}
        numbers = ("node_id", "node_count", "group_id", "n_groups")
        return cls(
            block_hash=work.block.hash,
            block_height=work.block.height,
            public_key=work.public_key,
            seq_len=work.seq_len,
            **(asdict(lane) if lane else dict.fromkeys(numbers)),
            **own,
        )


class DeploymentStatus(BaseModel):
    """What is deployed: by this a fleet decides whether servers are equal, in the same answer."""

    models: list[str]
    max_seq_len: int
    hidden_size: int
    weights_digest: str | None
    token_ids: int
    scheme: str | None
    seq_len: int | None
    k_dim: int | None
    max_nonces: int
    versions: dict[str, str]


class NodeStatusResponse(PowStatus):
    """The state of the node; docs/operations.md explains it.

    A part that cannot be read is null; its error says why.
    """

    status: State
    config: RoundConfig | None
    stats: RoundStats | None
    round_id: str | None
    scheme: str | None
    paused_reason: str | None
    error: str | None
    warning: str | None
    cores: list[CoreStatus]
    lanes: LaneUse | None
    queue: QueueGauges
    outbox: OutboxGauges | None
    outbox_error: str | None
    engine: EngineGauges | None
    engine_error: str | None
    liveness: list[CoreLiveness]
    fleet: FleetMembership | None
    receipts: ReceiptGauges | None
    receipts_error: str | None
    deployment: DeploymentStatus
