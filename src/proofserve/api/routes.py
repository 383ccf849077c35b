"""All routes below one prefix, and what a node says about itself: status, health, receipts."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from proofserve.api import metrics, proof_routes
from proofserve.api.access import ANONYMOUS, ApiError, Caller, Role
from proofserve.api.node import Node, ServedNode, answer_of_outbox, read_engine, status_of
from proofserve.api.requests import close_if_upgraded, guarded, proof_router
from proofserve.api.response_models import (
    DeepAnswer,
    HealthAnswer,
    LogPage,
    ReceiptKeys,
    ReceiptsAnswer,
    Versions,
    documented,
)
from proofserve.protocol.nonces import MAX_NONCE
from proofserve.rounds.receipts import ReceiptService
from proofserve.web import ResponseId
from proofserve.wire import PROOFS, RECEIPTS
from proofserve.wire.signed import signed_entry_body, signed_receipt_body
from proofserve.wire.status import NodeStatusResponse

OK: Final = "ok"
# How long a watched engine may take to answer before it counts as busy, seconds. Supervisors wait
# for few seconds, and a busy engine must not look like a dead one.
BUSY_ANSWER_S = 1.0
# For how long an engine that is not watched may be busy, seconds.
UNWATCHED_S = 60.0


def router(get_node: Callable[[Request], Node], has_keys: bool = True) -> APIRouter:
    """All routes of an application; ``get_node`` finds the node of a request.

    The OpenAPI page declares authorization where the server ``has_keys``.
    """
    with_key = proof_router(get_node, has_keys)
    with_key.get("/status", **documented(NodeStatusResponse, 503))(status)
    with_key.get("/versions", **documented(Versions, 503))(versions)
    proof_routes.add_to(with_key)
    metrics.add_to(with_key)
    with_key.get("/health/deep", **documented(DeepAnswer, 503), tags=["health"])(deep)
    # Supervisors have no key. One must see that the process is alive, with or without proofs.
    health = APIRouter(prefix=PROOFS, tags=["health"], route_class=guarded(get_node, ANONYMOUS))
    alive = documented(HealthAnswer, needs_key=False)
    health.add_api_route("/health/live", live, route_class_override=APIRoute, **alive)
    for path, check in (("/health/ready", ready), ("/health/engine", engine)):
        health.get(path, **documented(HealthAnswer, 503, needs_key=False))(check)
    # No key is needed: a response's id is known to its client only, unless the client chose one
    # that others can guess; the log has no ids. It comes first: the other path has every id.
    # All clients are counted together; operators' calls have their own limits.
    of_clients = guarded(get_node, Caller("receipts", Role.VIEWER))
    public = APIRouter(prefix=RECEIPTS, tags=["receipts"], route_class=of_clients)
    public.get("/log", **documented(LogPage, 422, 503, needs_key=False))(log)
    of_response = documented(ReceiptsAnswer, 404, 410, 422, 425, 503, needs_key=False)
    public.get("/{response_id:path}", **of_response)(receipts)
    all_routes = APIRouter()
    for each in (with_key, health, public):
        all_routes.include_router(each)
    return all_routes


async def status(node: ServedNode) -> NodeStatusResponse:
    """The round, its counters, and the state of queue, outbox and engine."""
    return await status_of(node)


async def versions(node: ServedNode) -> Versions:
    """The versions of vLLM, proofserve and what they use, and the digest of the weights.

    ``kernels`` says on what the model runs, as a calibration of honest nodes names it.

    ``weights_digest`` is null if the checkpoint has no safetensors files, ``receipts`` if chat
    answers get none, and ``public_key`` if the node signs nothing.
    """
    engine_info = node.deployment.engine_info
    versions = dict(engine_info.versions)
    keys = None
    if (service := node.receipts) is not None:
        keys = ReceiptKeys(
            public_key=service.public_key.hex(),
            sketch_key=service.answers.sketch_key,
            k_dim=service.answers.k_dim,
        )
    return Versions(
        vllm_version=versions.get("vllm"),
        poc_validation_inference=True,
        weights_digest=engine_info.facts.weights_digest,
        versions=versions,
        kernels=dict(engine_info.kernels),
        public_key=node.key.public_key.hex() if node.key else None,
        receipts=keys,
    )


# -- health ----------------------------------------------------------------------------------------


async def live(request: Request, response: Response) -> HealthAnswer:
    """The API process answers. Needs no key, and works while proofs are off."""
    close_if_upgraded(request, response)
    return HealthAnswer(status=OK)


async def ready(request: Request, node: ServedNode) -> HealthAnswer:
    """The engine works and the outbox can be written. Needs no key.

    503 names the part that failed; only a caller with a key gets the reason. An engine that has
    work and has not stepped for POC_ENGINE_STALL_SEC seconds has failed; one that is busy has not.
    """
    node.manager.require_open()
    probe = answer_of_outbox(node.outbox.probe())
    fault, (_, outbox) = await asyncio.gather(_engine_fault(node), probe)
    return _answer(node, request, {"engine": fault, "outbox": outbox})


async def engine(request: Request, node: ServedNode) -> HealthAnswer:
    """The engine works. Needs no key.

    For supervisors that restart a server: a full disk, which no restart repairs, is no reason for
    a 503 here. Otherwise as ``ready``.
    """
    return _answer(node, request, {"engine": await _engine_fault(node)})


async def deep(node: ServedNode) -> DeepAnswer:
    """Run one real forward after chat. 503 if it fails or chat leaves no time."""
    return DeepAnswer(status=OK, seconds=await node.manager.self_check())


async def _engine_fault(node: Node) -> str | None:
    """Why the engine does not work; None if it does.

    A core that is busy with one long step answers nothing meanwhile. Where all cores are watched,
    such an engine is ready.
    """
    cores = node.liveness()
    if cores and all(core.watched for core in cores):
        try:
            async with asyncio.timeout(BUSY_ANSWER_S):
                return (await read_engine(node))[1]
        except TimeoutError:
            return node.stall
    engine, fault = await read_engine(node)
    if engine is not None and engine.age_s > UNWATCHED_S:
        return f"the engine has not answered for {engine.age_s:.0f} s, and nothing watches it"
    return fault


def _answer(node: Node, request: Request, faults: dict[str, str | None]) -> HealthAnswer:
    """The answer of a node whose parts have ``faults``. Raises ApiError if one has."""
    if not any(faults.values()):
        return HealthAnswer(status=OK)
    try:
        node.access.admit(request, Role.VIEWER)
    except ApiError:
        faults = {part: fault and "failed" for part, fault in faults.items()}
    raise ApiError("not_ready", {part: fault or OK for part, fault in faults.items()})


# -- receipts --------------------------------------------------------------------------------------


async def receipts(node: ServedNode, response_id: ResponseId) -> JSONResponse:
    """The signed receipts of an answer that has ended, each with its place in the log.

    An id that is not known is waited for up to 2 s, then 404. 425 with Retry-After until the log
    has the receipt, which takes a second. 410 after the receipt's time to live.
    """
    found = await _service(node).of_response(response_id)
    return JSONResponse({"receipts": [signed_receipt_body(each) for each in found]})


async def log(
    node: ServedNode,
    after: Annotated[int, Query(ge=-1, le=MAX_NONCE)] = -1,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> JSONResponse:
    """Entries with an index above ``after``, in order: each has the hash of the one before."""
    service = _service(node)
    entries = await service.entries(after, limit)
    page = {
        "public_key": service.public_key.hex(),
        "entries": [signed_entry_body(each) for each in entries],
        "next_after": entries[-1].entry.index if entries else after,
    }
    return JSONResponse(page)


def _service(node: Node) -> ReceiptService:
    if node.receipts is None:
        raise ApiError("not_enabled", "this server makes no receipts")
    return node.receipts
