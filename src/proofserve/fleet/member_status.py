"""The part of a member's ``GET /status`` that a fleet uses."""

from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from proofserve.protocol.nonces import NonceLane
from proofserve.rounds.records import RoundSpec, Workload
from proofserve.rounds.state import State
from proofserve.wire.records import UnicodeText, Whole

# Members are other programs: no text or list of theirs may be long.
Text = Annotated[UnicodeText, Field(max_length=2000)]
Seconds = Annotated[FiniteFloat, Field(ge=0)]


class MemberConfig(BaseModel):
    """Which round the member has configured. A round that only judges has no lane."""

    block_hash: Text
    block_height: Whole
    public_key: Text
    node_id: int | None
    node_count: int | None
    group_id: int | None
    n_groups: int | None
    seq_len: Whole
    # An object in a round of the distance protocol.
    scheme: Text | Annotated[dict[Text, Text | bool], Field(max_length=20)]

    def judges(self, work: Workload) -> bool:
        """Whether ``/validate`` would recompute by the block, scheme and length of ``work``."""
        block = (self.block_hash, self.block_height) == (work.block.hash, work.block.height)
        return block and self.seq_len == work.seq_len and self.scheme == work.scheme.to_wire()

    def is_of(self, spec: RoundSpec, lane: NonceLane) -> bool:
        """Whether it is ``spec`` with the nonces of ``lane``."""
        numbers = (self.node_id, self.node_count, self.group_id, self.n_groups)
        return (
            (self.block_hash, self.block_height) == (spec.work.block.hash, spec.work.block.height)
            and self.public_key == spec.work.public_key
            and numbers == (lane.node_id, lane.node_count, lane.group_id, lane.n_groups)
        )


class MemberStats(BaseModel):
    total_processed: Whole
    total_found: Whole
    failed: Whole
    recent_nonces_per_second: Seconds
    deferred_calls: Whole
    deferred_s: Seconds
    faults: Whole


class MemberEngine(BaseModel):
    forwards: Whole
    busy_s: Seconds
    deferred_s: Seconds
    last_forward_s: Seconds
    longest_chat_wait_s: Seconds
    longest_chat_wait_batches: Seconds
    leased_blocks: Whole
    free_blocks: Whole
    unfinished_requests: Whole


class MemberOutbox(BaseModel):
    pending: Whole
    expired: Whole
    oldest_pending_s: Seconds
    last_error: Text | None


class MemberLiveness(BaseModel):
    """One engine core. ``waited_s``: since its last step while it has had work, otherwise 0."""

    steps: Whole = 0
    waited_s: Seconds = 0.0
    stalled: bool = False
    reason: Text | None = None


class MemberDeployment(BaseModel):
    models: Annotated[list[Text], Field(max_length=100)]
    max_seq_len: Annotated[int, Field(ge=1)]
    hidden_size: Annotated[int, Field(ge=1)]
    weights_digest: Text | None
    token_ids: Whole
    scheme: Text | None
    seq_len: Annotated[int, Field(ge=1)] | None
    k_dim: Annotated[int, Field(ge=1)] | None
    max_nonces: Annotated[int, Field(ge=1)]
    versions: Annotated[dict[Text, Text], Field(max_length=100)]


class MemberStatus(BaseModel):
    """What a member said about itself. Fields that newer members add are ignored."""

    status: State
    round_id: Text | None
    config: MemberConfig | None
    stats: MemberStats | None
    paused_reason: Text | None = None
    error: Text | None = None
    engine: MemberEngine | None = None
    engine_error: Text | None = None
    outbox: MemberOutbox | None = None
    outbox_error: Text | None = None
    liveness: Annotated[list[MemberLiveness], Field(max_length=1024)] = []
    # None in the status of a proofserve that knows no fleets.
    deployment: MemberDeployment | None = None

    @property
    def generates(self) -> bool:
        return self.status is State.GENERATING


def read_status(body: object) -> MemberStatus:
    """Raises ValueError, which names the field, for a body that is not a status."""
    try:
        return MemberStatus.model_validate(body)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error


def first_problem(error: ValidationError) -> str:
    """The first field that is wrong, and why."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
