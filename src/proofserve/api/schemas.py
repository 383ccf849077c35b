"""The request bodies. Every number has a type and a range; unknown keys are refused.

Strict: a bool, a float or a string is not an integer here. What depends on the deployment (the
model's context, the list limits) is checked in ``translate``.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    FailFast,
    Field,
    FiniteFloat,
    JsonValue,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from proofserve.protocol import ARTIFACT_K_DIM, SEQ_LEN, SKETCH, SKETCH_K_DIM
from proofserve.rounds.records import FRAUD_THRESHOLD, StatTest
from proofserve.web import http_parts
from proofserve.wire.records import ARTIFACT, DISTANCE, ArtifactRecord, Whole, WorkRecord, by_field

# Limit of node and group numbers, so that the first nonces of a node stay in range.
_MAX_COUNT = 2**31 - 1
# The value of a node number or node count that is not given.
UNSET = -1
_DEFAULT_TEST = StatTest()
# Of one request. The node reads the whole batch of each nonce.
MOST_OPENED = 1000
# More keys than a valid body has. An error that names a million keys would take seconds.
_TOO_MANY_KEYS = 256


_WORK_EXAMPLE: dict[str, JsonValue] = {
    "block_hash": "c0ffee",
    "block_height": 100,
    "public_key": "node-key",
    "node_id": 0,
}
ARTIFACT_EXAMPLE: dict[str, JsonValue] = {
    **_WORK_EXAMPLE,
    "node_count": 1,
    "params": {"model": "toy", "seq_len": SEQ_LEN, "k_dim": ARTIFACT_K_DIM},
}
ARTIFACT_ROUND_EXAMPLE: dict[str, JsonValue] = {**ARTIFACT_EXAMPLE, "group_id": 1, "n_groups": 2}
JOB_EXAMPLES: list[JsonValue] = [
    {**ARTIFACT_EXAMPLE, "nonces": [0, 1, 2]},
    {
        **ARTIFACT_EXAMPLE,
        "nonces": [7],
        "wait": True,
        "validation": {"artifacts": [{"nonce": 7, "vector_b64": "A" * 32}]},
        "stat_test": {"dist_threshold": 0.4, "p_mismatch": 0.1},
    },
    {
        **ARTIFACT_EXAMPLE,
        "params": {"model": "toy", "seq_len": SEQ_LEN, "k_dim": SKETCH_K_DIM},
        "scheme": SKETCH,
        "nonces": [0, 1, 2],
    },
]
DISTANCE_ROUND_EXAMPLE: dict[str, JsonValue] = {**_WORK_EXAMPLE, "node_count": 1, "r_target": 1.405}
# Claims for the round above; the second distance is not below its target.
DISTANCE_CLAIMS_EXAMPLE: dict[str, JsonValue] = {
    **_WORK_EXAMPLE,
    "nonces": [3, 17],
    "dist": [1.401, 1.409],
}
_OPEN_EXAMPLES: list[JsonValue] = [
    {"block_hash": "c0ffee", "public_key": "node-key", "nonces": [3, 17]},
    {"block_hash": "c0ffee", "public_key": "node-key", "seed": "9f2c", "count": 100},
]


def _callback_base(url: str) -> str:
    parts = http_parts(url)
    if parts is None or not url.isascii():
        raise PydanticCustomError("url", "url must be an http or https address in ASCII")
    if parts.username is not None or parts.password is not None:
        raise PydanticCustomError("url", "url must not hold a user name or a password")
    if "?" in url or "#" in url:
        raise PydanticCustomError("url", "url must end in a path: /generated is appended to it")
    return url


Text = Annotated[str, Field(min_length=1, max_length=1024)]
Index = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
Count = Annotated[int, Field(ge=1, le=_MAX_COUNT)]
Probability = Annotated[FiniteFloat, Field(gt=0, lt=1)]
BatchSize = Annotated[int, Field(ge=3, le=1024)]
Nonces = Annotated[list[Whole], FailFast(), Field(min_length=1)]
OptionalNumber = Annotated[int, Field(ge=UNSET, le=_MAX_COUNT)]
GroupNumber = Annotated[
    Index, Field(description="Number of this server in its node, below n_groups.")
]
GroupCount = Annotated[Count, Field(description="How many servers share the node's nonces.")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Url = Annotated[str, Field(max_length=2048), AfterValidator(_callback_base)]


class Body(BaseModel, extra="forbid", strict=True, frozen=True):
    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > _TOO_MANY_KEYS:
            raise PydanticCustomError(
                "keys", "{keys} keys are more than any body has", {"keys": len(body)}
            )
        return body


class Params(Body):
    """Values that must equal those of the deployment, because results depend on them."""

    model: Text = Field(description="A name under which this server serves its model.")
    seq_len: Count = Field(description="Tokens per nonce.")
    k_dim: Count = Field(
        ARTIFACT_K_DIM,
        description=f"Values of a vector; {SKETCH} has {SKETCH_K_DIM} if it is left out.",
    )


class WorkFields(Body, WorkRecord):
    block_hash: Text = Field(description="Hash of the block that the work is for.")
    block_height: Whole = Field(description="Its height; reported, without effect on results.")
    public_key: Text = Field(description="Key of the node that claims the work.")
    batch_size: BatchSize | None = Field(
        None, description="Nonces per engine call; the server has a default."
    )


class CommonFields(WorkFields):
    """What a round and a job of the artifact protocol have in common."""

    node_id: Index = Field(description="Number of this node, below node_count.")
    node_count: Count = Field(description="How many nodes share the nonces.")
    params: Params
    url: Url | None = Field(None, description="Callbacks are POSTed below this address.")
    scheme: Text | None = Field(
        None,
        description="artifact-v1, artifact-v1-layers, sketch-v1 or sketch-v2. If left out, the"
        " node's own, or artifact-v1 where the node proves any.",
    )
    weights_digest: Digest | None = Field(
        None, description="The digest of the weights that the node must serve, see /versions."
    )
    poc_stronger_rng: bool = Field(
        False, description="Draw inputs from 256-bit seeds; artifact-v1-layers only."
    )


class RoundRequest(
    CommonFields, json_schema_extra={"examples": [ARTIFACT_EXAMPLE, ARTIFACT_ROUND_EXAMPLE]}
):
    """Generate proofs until stopped."""

    group_id: GroupNumber = 0
    n_groups: GroupCount = 1
    commit: Literal["vectors", "roots"] = Field(
        "vectors", description="What callbacks publish: vectors, or the root of each batch."
    )


class ClaimModel(Body, ArtifactRecord):
    """The artifact that a prover claims for a nonce. A text that does not decode is a mismatch."""

    vector_b64: str = Field(max_length=65536)


class Claims(Body):
    """The claims to judge: about exactly the requested nonces."""

    artifacts: Annotated[list[ClaimModel], FailFast()]


class Thresholds(Body):
    """When a comparison counts as fraud."""

    # Vectors have length 1: no two are further apart than 2.
    dist_threshold: Annotated[FiniteFloat, Field(gt=0, le=2)] = Field(
        _DEFAULT_TEST.dist_threshold, description="A vector further than this is a mismatch."
    )
    p_mismatch: Probability = Field(
        _DEFAULT_TEST.p_mismatch, description="Share of honest mismatches."
    )
    fraud_threshold: Probability | None = Field(
        None, description=f"Fraud below this p-value; {_DEFAULT_TEST.fraud_threshold} if left out."
    )
    p_value_threshold: Probability | None = Field(
        None, description="Another name of fraud_threshold."
    )

    @model_validator(mode="after")
    def _one_threshold(self) -> "Thresholds":
        names = (self.fraud_threshold, self.p_value_threshold)
        if None not in names and self.fraud_threshold != self.p_value_threshold:
            raise PydanticCustomError(
                "threshold", "fraud_threshold and p_value_threshold name one value and differ"
            )
        return self


class JobRequest(CommonFields, json_schema_extra={"examples": JOB_EXAMPLES}):
    """Prove the given nonces, or judge the claims about them."""

    @model_validator(mode="before")
    @classmethod
    def _not_of_distance(cls, body: Any) -> Any:
        """Refuse a body of the distance protocol before its other errors are listed."""
        if isinstance(body, dict) and "r_target" in body:
            raise PydanticCustomError(
                "protocol",
                "r_target selects the distance protocol, which has no such call;"
                " give params (artifact protocol), or use /validate",
            )
        return body

    nonces: Nonces
    wait: bool = Field(False, description="Answer with the result instead of an id.")
    validation: Claims | None = None
    stat_test: Thresholds | None = None


class DistanceRoundRequest(WorkFields, json_schema_extra={"examples": [DISTANCE_ROUND_EXAMPLE]}):
    """A round: what is computed, the nonces of this node, and when a nonce wins."""

    group_id: GroupNumber = 0
    n_groups: GroupCount = 1
    # Points on a sphere of radius 1: no two are further apart than 2.
    r_target: Annotated[FiniteFloat, Field(gt=0, le=2)] = Field(
        description="A nonce wins when its distance is below this."
    )
    fraud_threshold: Probability = Field(
        FRAUD_THRESHOLD, description="Claims less likely to be honest than this are fraud."
    )
    node_id: OptionalNumber = Field(
        UNSET, description="Number of this node, below node_count; -1 for a node that only judges."
    )
    node_count: OptionalNumber = Field(
        UNSET, description="How many nodes share the nonces; -1 as for node_id."
    )
    seq_len: Count = Field(SEQ_LEN, description="Tokens per nonce.")
    callback_url: Url | None = Field(None, description="Callbacks are POSTed below this address.")
    use_sign_flips: bool = Field(True, description="Flip signs of the hidden state by nonce.")
    use_layer_hooks: bool = Field(False, description="Transform the output of every layer.")


class DistanceClaimsRequest(
    Body, WorkRecord, json_schema_extra={"examples": [DISTANCE_CLAIMS_EXAMPLE]}
):
    """A prover's winners: ``dist[i]`` is claimed for ``nonces[i]``. NaN is invalid."""

    public_key: Text = Field(description="Key of the node that claims them.")
    block_hash: Text = Field(description="Must be the configured round's.")
    block_height: Whole = Field(description="Must be the configured round's.")
    nonces: Nonces
    dist: Annotated[list[float], FailFast()] = Field(description="One distance for each nonce.")
    node_id: OptionalNumber = Field(
        description="Number of the node that claims them; without effect on results."
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


class OpenRequest(Body, json_schema_extra={"examples": _OPEN_EXAMPLES}):
    """Nonces to open, or a seed and how many nonces it shall draw."""

    block_hash: Text = Field(description="Block of the round.")
    public_key: Text = Field(description="Key of the round.")
    round_id: Text | None = Field(
        None, description="Needed if several rounds of the block and key commit roots."
    )
    nonces: list[Whole] | None = Field(
        None, min_length=1, max_length=MOST_OPENED, description="Each once."
    )
    seed: Text | None = Field(None, description="Draws among all nonces committed so far.")
    count: int | None = Field(None, ge=1, le=MOST_OPENED, description="How many to draw.")

    @model_validator(mode="after")
    def _one_choice(self) -> "OpenRequest":
        drawn = (self.seed is not None, self.count is not None)
        if drawn != (self.nonces is None,) * 2:
            raise PydanticCustomError("choice", "give either nonces, or seed and count")
        return self


class MeasureRequest(Body):
    """Bare forwards of one workload without pauses; chat waits until they are done."""

    block_hash: Text
    public_key: Text
    params: Params | None = Field(None, description="Of the artifact protocol.")
    scheme: Text | None = Field(None, description="Of the artifact protocol, as in a round.")
    seq_len: Count | None = Field(None, description="Of the distance protocol, with sign flips.")
    batch_size: Annotated[int, Field(ge=1, le=1024)] = 32
    forwards: Annotated[int, Field(ge=1, le=1000)] = 10

    @model_validator(mode="after")
    def _one_protocol(self) -> "MeasureRequest":
        if (self.params is None) is (self.seq_len is None):
            raise PydanticCustomError(
                "protocol", "exactly one of params (artifact) and seq_len (distance) is needed"
            )
        if self.params is None and self.scheme is not None:
            raise PydanticCustomError("protocol", "scheme belongs to params (artifact)")
        return self
