"""The request bodies of the distance protocol (protocol A.7 with P.2)."""

from typing import Annotated

from pydantic import (
    ConfigDict,
    FailFast,
    Field,
    FiniteFloat,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from proofserve.api.schemas import (
    DISTANCE_CLAIMS_EXAMPLE,
    DISTANCE_ROUND_EXAMPLE,
    BatchSize,
    Body,
    Count,
    Index,
    Probability,
    RoundRequest,
    Text,
    Url,
)
from proofserve.rounds.records import FRAUD_THRESHOLD
from proofserve.wire.protocols import ARTIFACT, DISTANCE, by_field
from proofserve.wire.records import Whole, WorkRecord

UNSET = -1
_MAX_COUNT = 2**31 - 1
_SEQ_LEN = 256


class DistanceRoundRequest(Body, WorkRecord):
    """A round: what is computed, which nonces are this node's, and when one wins."""

    model_config = ConfigDict(json_schema_extra={"examples": [DISTANCE_ROUND_EXAMPLE]})

    block_hash: Text = Field(description="Hash of the block that the work is for.")
    block_height: Whole = Field(description="Its height; reported, not part of the numbers.")
    public_key: Text = Field(description="Key of the node that claims the work.")
    # Points on a sphere of radius 1: no two are further apart than 2.
    r_target: Annotated[FiniteFloat, Field(gt=0, le=2)] = Field(
        description="A nonce wins when its distance is below this."
    )
    fraud_threshold: Probability = Field(
        FRAUD_THRESHOLD, description="Claims less likely to be honest than this are fraud."
    )
    node_id: Annotated[int, Field(ge=UNSET, le=_MAX_COUNT)] = Field(
        UNSET, description="Number of this node, below node_count; -1 for a node that only judges."
    )
    node_count: Annotated[int, Field(ge=UNSET, le=_MAX_COUNT)] = Field(
        UNSET, description="How many nodes share the nonces; -1 as for node_id."
    )
    group_id: Index = Field(0, description="Number of this server in its node, below n_groups.")
    n_groups: Count = Field(1, description="How many servers share the node's nonces.")
    batch_size: BatchSize | None = Field(
        None, description="Nonces per engine call; the server has a default."
    )
    seq_len: Count = Field(_SEQ_LEN, description="Tokens per nonce.")
    callback_url: Url | None = Field(None, description="Callbacks are POSTed below this address.")
    use_sign_flips: bool = Field(True, description="Flip signs of the hidden state by nonce.")
    use_layer_hooks: bool = Field(False, description="Transform the output of every layer.")


class DistanceClaimsRequest(Body, WorkRecord):
    """A prover's winners: ``dist[i]`` is claimed for ``nonces[i]``. NaN is invalid."""

    model_config = ConfigDict(json_schema_extra={"examples": [DISTANCE_CLAIMS_EXAMPLE]})

    public_key: Text = Field(description="Key of the node that claims them.")
    block_hash: Text = Field(description="Must be the configured round's.")
    block_height: Whole = Field(description="Must be the configured round's.")
    nonces: Annotated[list[Whole], FailFast(), Field(min_length=1)]
    dist: Annotated[list[float], FailFast()] = Field(description="One distance for each nonce.")
    node_id: Annotated[int, Field(ge=UNSET, le=_MAX_COUNT)] = Field(
        description="Number of the node that claims them; not part of the numbers."
    )

    @model_validator(mode="after")
    def _as_many(self) -> "DistanceClaimsRequest":
        if len(self.dist) != len(self.nonces):
            raise PydanticCustomError(
                "length",
                "dist has {dist} values for {nonces} nonces",
                {"dist": len(self.dist), "nonces": len(self.nonces)},
            )
        return self


AnyRoundRequest = Annotated[
    Annotated[RoundRequest, Tag(ARTIFACT)] | Annotated[DistanceRoundRequest, Tag(DISTANCE)],
    by_field("params", "r_target"),
]
