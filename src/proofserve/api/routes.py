"""All routes below one prefix, and those that both protocols share (protocol A.7, B.5, P.1)."""

import uuid
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Security
from fastapi.security import HTTPBearer

from proofserve.api import (
    artifact_routes,
    distance_routes,
    health_routes,
    metrics,
    opening_routes,
    translate,
)
from proofserve.api.access import ANONYMOUS
from proofserve.api.failures import guarded
from proofserve.api.node import Node, ServedNode, require_engine
from proofserve.api.receipts import receipt_routes
from proofserve.api.response_models import (
    NodeStatusResponse,
    ResultsPage,
    StartAnswer,
    StopAnswer,
    Versions,
    documented,
)
from proofserve.api.schemas import AnyRoundRequest, DistanceRoundRequest
from proofserve.api.status import pow_status, receipt_keys, status_body, stopped_body
from proofserve.protocol.nonces import MAX_NONCE
from proofserve.wire.examples import ARTIFACT_ROUND_EXAMPLE, DISTANCE_ROUND_EXAMPLE
from proofserve.wire.paths import PROOFS
from proofserve.wire.records import result_record

_EXAMPLES = {
    "artifact": {"summary": "artifact protocol", "value": ARTIFACT_ROUND_EXAMPLE},
    "distance": {"summary": "distance protocol", "value": DISTANCE_ROUND_EXAMPLE},
}


def router(get_node: Callable[[Request], Node], has_keys: bool = True) -> APIRouter:
    """All routes of an application; ``get_node`` finds the node of a request.

    The OpenAPI page declares authorization where the server ``has_keys``.
    """
    made = empty_router(get_node, has_keys)
    without_key = APIRouter(
        prefix=PROOFS, tags=["health"], route_class=guarded(get_node, ANONYMOUS)
    )
    _add_shared(made)
    artifact_routes.add_to(made)
    distance_routes.add_to(made)
    opening_routes.add_to(made)
    metrics.add_to(made)
    health_routes.add_to(made, without_key)
    both = APIRouter()
    both.include_router(made)
    both.include_router(without_key)
    both.include_router(receipt_routes.router(get_node))
    return both


def empty_router(get_node: Callable[[Request], Node], has_keys: bool = True) -> APIRouter:
    # For the OpenAPI page only: the route class itself checks the key, before the body.
    said = "An operator's, a validator's or a viewer's key."
    key = Security(HTTPBearer(auto_error=False, description=said))
    return APIRouter(
        prefix=PROOFS,
        tags=["proofs"],
        route_class=guarded(get_node),
        dependencies=[key] if has_keys else [],
    )


def _add_shared(router: APIRouter) -> None:
    router.post("/init/generate", **documented(StartAnswer, 400, 409, 422, 503))(start_round)
    router.get("/status", **documented(NodeStatusResponse, 503))(status)
    router.post("/stop", **documented(StopAnswer, 503))(stop)
    router.get("/results", **documented(ResultsPage, 422, 503))(results)
    router.get("/versions", **documented(Versions, 503))(versions)


async def start_round(
    node: ServedNode, body: Annotated[AnyRoundRequest, Body(openapi_examples=_EXAMPLES)]
) -> dict[str, Any]:
    """Start generating proofs, until stopped. 409 while a round runs.

    ``r_target`` in the body selects the distance protocol, ``params`` the artifact protocol.
    """
    round_id = str(uuid.uuid4())
    if isinstance(body, DistanceRoundRequest):
        field = "callback_url"
        spec = translate.distance_round(body, node.deployment, round_id)
    else:
        field = "url"
        spec = translate.artifact_round(body, node.deployment, round_id)
    warning = await translate.url_warning(field, spec.url, node.deployment)
    await require_engine(node)
    await node.manager.start(spec)
    more = node.warn(round_id, warning)
    if isinstance(body, DistanceRoundRequest):
        return {"status": "OK", "pow_status": await pow_status(node), **more}
    return {"status": "OK", "pow_status": {"status": "GENERATING"}, **more}


async def status(node: ServedNode) -> dict[str, Any]:
    """The round, its counters, and the state of queue, outbox and engine."""
    return await status_body(node)


async def stop(node: ServedNode) -> dict[str, Any]:
    """Store finished results, stop the round, and cancel queued jobs."""
    await node.manager.stop()
    return {"status": "OK", "pow_status": await stopped_body(node)}


async def results(
    node: ServedNode,
    after: Annotated[int, Query(ge=0, le=MAX_NONCE)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> dict[str, Any]:
    """Stored results with ``seq > after``. The next page begins after ``next_after``.

    A row has ``vector_b64`` (artifact protocol), ``dist`` (a winner of the distance protocol)
    or ``error``.
    """
    rows = await node.outbox.results(after, limit)
    return {
        "results": [result_record(row) for row in rows],
        "next_after": rows[-1].seq if rows else after,
    }


async def versions(node: ServedNode) -> dict[str, Any]:
    """The versions of vLLM, proofserve and what they use, and the digest of the weights.

    ``kernels`` says on what the model runs, as a calibration of honest nodes names it.

    ``weights_digest`` is null if the checkpoint has no safetensors files, ``receipts`` if chat
    answers get none.
    """
    engine_info = node.deployment.engine_info
    versions = dict(engine_info.versions)
    return {
        "vllm_version": versions.get("vllm"),
        "poc_validation_inference": True,
        "weights_digest": engine_info.facts.weights_digest,
        "versions": versions,
        "kernels": dict(engine_info.kernels),
        "receipts": receipt_keys(node),
    }
