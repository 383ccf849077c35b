"""From request bodies to the frozen records of ``rounds``, checked against the deployment.

All functions raise ApiError for a body that is for another deployment, and ProtocolError
for a number that is too large or too small for the deployment or for the rest of the body.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from proofserve.api import schemas
from proofserve.api.access import ApiError
from proofserve.api.node import Deployment
from proofserve.protocol import (
    ARTIFACT,
    ARTIFACT_LAYERS,
    DEFAULT_SCHEME,
    SKETCH_2,
    SKETCHES,
    schemes,
)
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.identity import Block
from proofserve.protocol.network_schemes import DistanceScheme
from proofserve.protocol.nonces import NonceLane, check_nonces
from proofserve.protocol.scheme import Scheme
from proofserve.protocol.sketch import SketchScheme
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.records import (
    FRAUD_THRESHOLD,
    DistanceClaims,
    Job,
    RoundSpec,
    StatTest,
    Target,
    Workload,
)

# The schemes of the artifact protocol; the first is the network's.
ARTIFACT_SCHEMES = (ARTIFACT, ARTIFACT_LAYERS, *SKETCHES)


def artifact_round(body: schemas.RoundRequest, deployment: Deployment, round_id: str) -> RoundSpec:
    work = _workload(body, deployment)
    batch_size = body.batch_size or deployment.default_batch_size
    commits_roots = body.commit == "roots"
    if commits_roots and body.url is None:
        raise ProtocolError("url", "a round that commits roots must have a url to post them to")
    return RoundSpec(
        round_id=round_id,
        work=work,
        lane=_lane(body, batch_size),
        batch_size=batch_size,
        url=body.url,
        commits_roots=commits_roots,
    )


def job(body: schemas.JobRequest, deployment: Deployment) -> Job:
    """The job that ``body`` describes. Raises ApiError for claims about other nonces."""
    work = _workload(body, deployment)
    # The nonces are given, not taken from the lane; this only checks the node's numbers.
    NonceLane(body.node_id, body.node_count)
    _check_length("nonces", body.nonces, deployment)
    check_nonces("nonces", body.nonces)
    claims = None
    if body.validation is not None:
        artifacts = body.validation.artifacts
        _check_length("validation.artifacts", artifacts, deployment)
        if {claim.nonce for claim in artifacts} != set(body.nonces):
            raise ApiError("claims_mismatch", "validation.artifacts nonces must match nonces field")
        claims = tuple(Claim(claim.nonce, claim.vector_b64) for claim in artifacts)
    test = StatTest()
    if (asked := body.stat_test) is not None:
        fraud = asked.fraud_threshold or asked.p_value_threshold or FRAUD_THRESHOLD
        test = StatTest(asked.dist_threshold, asked.p_mismatch, fraud)
    return Job(
        work=work,
        nonces=tuple(body.nonces),
        batch_size=body.batch_size or deployment.default_batch_size,
        node_id=body.node_id,
        url=body.url,
        claims=claims,
        test=test,
    )


def _workload(body: schemas.CommonFields, deployment: Deployment) -> Workload:
    scheme = artifact_scheme(body.scheme, body.params, deployment, body.poc_stronger_rng)
    served = deployment.engine_info.facts.weights_digest
    if body.weights_digest not in (None, served):
        requested = {"weights_digest": body.weights_digest}
        raise _mismatch("weights_digest", requested, {"weights_digest": served})
    block = Block(body.block_hash, body.block_height)
    return Workload(scheme, block, body.public_key, body.params.seq_len)


def artifact_scheme(
    name: str | None, params: schemas.Params, deployment: Deployment, stronger_rng: bool = False
) -> Scheme:
    """The scheme that a request names, or its default, on the deployed model."""
    wanted = name or deployment.scheme or DEFAULT_SCHEME
    proved = ARTIFACT_SCHEMES if deployment.scheme is None else (deployment.scheme,)
    if wanted not in proved:
        deployed = deployment.scheme or list(proved)
        raise _mismatch("scheme", {"scheme": wanted}, {"scheme": deployed})
    # A k_dim that is left out is the scheme's own default.
    options: dict[str, Any] = {}
    if "k_dim" in params.model_fields_set:
        options = {"k_dim": params.k_dim}
    field = "params.k_dim"
    try:
        scheme = schemes.scheme(wanted, **options)
        if stronger_rng:
            field = "poc_stronger_rng"
            scheme = schemes.scheme(wanted, **options, stronger_rng=True)
    except ProtocolError as error:
        raise ProtocolError(field, error.message) from None
    _match_params(params, scheme, deployment)
    _require_usable(scheme, params, deployment)
    return scheme


def _mismatch(what: str, requested: Mapping[str, Any], deployed: Mapping[str, Any]) -> ApiError:
    detail = {"error": f"{what} mismatch", "requested": requested, "deployed": deployed}
    return ApiError("deployment_mismatch", detail)


def _match_params(params: schemas.Params, scheme: Scheme, deployment: Deployment) -> None:
    models, k_dim = deployment.engine_info.model_names, scheme.to_wire()["k_dim"]
    if (
        params.model not in models
        or deployment.seq_len not in (None, params.seq_len)
        or deployment.k_dim not in (None, k_dim)
    ):
        requested = {**params.model_dump(), "k_dim": k_dim}
        deployed = {"model": list(models), "seq_len": deployment.seq_len, "k_dim": deployment.k_dim}
        raise _mismatch("params", requested, deployed)


def _require_usable(scheme: Scheme, params: schemas.Params, deployment: Deployment) -> None:
    """Raise for a scheme that the deployed model cannot have."""
    engine = deployment.engine_info
    facts = engine.facts
    _check_fits("params.seq_len", params.seq_len, engine.max_seq_len, "context")
    if scheme.name == SKETCH_2 and engine.experts_obstacle is not None:
        needed = {"scheme": scheme.name, "needs": "a model whose experts the block can choose"}
        raise _mismatch("scheme", needed, {"experts": engine.experts_obstacle})
    if not isinstance(scheme, SketchScheme):
        _check_fits("params.k_dim", params.k_dim, facts.hidden_size, "hidden size")
    elif facts.weights_digest is None or facts.tokens is None:
        count = len(facts.tokens) if facts.tokens else 0
        requested = {"scheme": scheme.name, "needs": "a weights_digest and at least 2 token ids"}
        deployed = {"weights_digest": facts.weights_digest, "token_ids": count}
        raise _mismatch("scheme", requested, deployed)


def _lane(body: schemas.RoundRequest | schemas.DistanceRoundRequest, batch_size: int) -> NonceLane:
    """Raises ProtocolError for a lane with less than one batch of nonces."""
    lane = NonceLane(body.node_id, body.node_count, body.group_id, body.n_groups)
    try:
        lane.batch(0, batch_size)
    except ProtocolError:
        raise ProtocolError(
            "node_count",
            f"with {lane.n_groups} groups this server has less than one batch of nonces",
        ) from None
    return lane


def _check_length(field: str, values: Sequence[object], deployment: Deployment) -> None:
    if len(values) > deployment.max_nonces:
        raise ProtocolError(
            field,
            f"{len(values)} are more than the {deployment.max_nonces} of a request"
            " (POC_MAX_QUEUED_NONCES)",
        )


async def url_warning(field: str, url: str | None, deployment: Deployment) -> str | None:
    """A warning about a callback URL, if any. Raises ProtocolError if no callback may go there."""
    if url is None:
        return None
    try:
        warning = await deployment.check_url(url)
    except ValueError as error:
        raise ProtocolError(field, str(error)) from None
    return f"{field}: {warning}" if warning else None


def _check_fits(field: str, value: int, limit: int, what: str) -> None:
    if value > limit:
        raise ProtocolError(field, f"{value} exceeds the model's {what} of {limit}")


def distance_round(
    body: schemas.DistanceRoundRequest, deployment: Deployment, round_id: str
) -> RoundSpec:
    """The round that ``body`` describes; it has a lane if the node's numbers are set."""
    if deployment.seq_len not in (None, body.seq_len):
        raise _mismatch("params", {"seq_len": body.seq_len}, {"seq_len": deployment.seq_len})
    _check_fits("seq_len", body.seq_len, deployment.engine_info.max_seq_len, "context")
    scheme = DistanceScheme(sign_flips=body.use_sign_flips, layer_hooks=body.use_layer_hooks)
    block = Block(body.block_hash, body.block_height)
    batch_size = body.batch_size or deployment.default_batch_size
    is_unset = schemas.UNSET in (body.node_id, body.node_count)
    if is_unset and body.node_count == 0:
        raise ProtocolError("node_count", "0 is below 1")
    return RoundSpec(
        round_id=round_id,
        work=Workload(scheme, block, body.public_key, body.seq_len),
        lane=None if is_unset else _lane(body, batch_size),
        batch_size=batch_size,
        url=body.callback_url,
        target=Target(body.r_target, body.fraud_threshold),
    )


def distance_claims(body: schemas.DistanceClaimsRequest, deployment: Deployment) -> DistanceClaims:
    _check_length("nonces", body.nonces, deployment)
    check_nonces("nonces", body.nonces)
    return DistanceClaims(
        block=Block(body.block_hash, body.block_height),
        public_key=body.public_key,
        node_id=body.node_id,
        nonces=tuple(body.nonces),
        distances=tuple(body.dist),
    )


def measured_work(body: schemas.MeasureRequest, deployment: Deployment) -> Workload:
    block = Block(body.block_hash, 0)
    if body.seq_len is not None:
        return Workload(DistanceScheme(), block, body.public_key, body.seq_len)
    if body.params is None:
        raise AssertionError("the body's own check lets exactly one protocol pass")
    scheme = artifact_scheme(body.scheme, body.params, deployment)
    return Workload(scheme, block, body.public_key, body.params.seq_len)
