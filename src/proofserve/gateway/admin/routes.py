"""The gateway's own endpoints. The relayed ones are declared here and served by ``protocol``."""

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from pydantic import BaseModel, ConfigDict, Field

from proofserve.gateway.admin.openapi import (
    ADMIN,
    CLIENTS,
    Draining,
    Health,
    Models,
    NotReadyModel,
    Ready,
    ShownBackend,
    answering,
    relaying,
)
from proofserve.gateway.admin.operator_route import AdminRoute
from proofserve.gateway.backends.fleet import Backend
from proofserve.gateway.failures import Failure, RefusedByGateway
from proofserve.gateway.relay.gateway import Gateway


class BackendName(BaseModel):
    """Which backend is meant."""

    model_config = ConfigDict(extra="forbid", strict=True)

    backend: str = Field(description="Its URL, as GET /admin/backends shows it.")


def gateway_of(request: Request) -> Gateway:
    """The gateway that this application was started with."""
    gateway: Gateway = request.state.gateway
    return gateway


Shared = Annotated[Gateway, Depends(gateway_of)]


router = APIRouter()
operators = APIRouter(
    prefix="/admin", tags=["operations"], route_class=AdminRoute, dependencies=[ADMIN]
)


@router.get("/v1/health", tags=["health"], **answering(Health, unavailable=Draining))
@router.get("/health", tags=["health"], **answering(Health, unavailable=Draining))
def health(gateway: Shared) -> JSONResponse:
    """Whether new requests are accepted: 503 from the moment on in which a shutdown begins."""
    if gateway.draining:
        return JSONResponse({"status": "draining"}, HTTPStatus.SERVICE_UNAVAILABLE)
    return JSONResponse({"status": "ok"})


@router.get("/health/ready", tags=["health"], **answering(Ready, unavailable=NotReadyModel))
def ready(gateway: Shared) -> JSONResponse:
    """Whether a request would find a backend; 503 if not."""
    usable = [b.name for b in gateway.fleet.backends if b.healthy and not b.draining]
    if gateway.draining or not usable:
        body = {"status": "draining" if gateway.draining else "no backend", "backends": usable}
        return JSONResponse(body, HTTPStatus.SERVICE_UNAVAILABLE)
    return JSONResponse({"status": "ok", "backends": usable})


@router.get("/v1/models", tags=["openai"], dependencies=[CLIENTS], **answering(Models, 401))
def models(gateway: Shared, request: Request) -> JSONResponse:
    """The models of all backends that are up, each once."""
    if gateway.clients.find(request.headers.get("authorization", "").encode("latin-1")) is None:
        raise RefusedByGateway(Failure(401, "invalid_api_key", "No client has this key."))
    merged: dict[str, Any] = {}
    for backend in gateway.fleet.backends:
        if backend.healthy and not backend.draining:
            merged = {**(backend.models or {}), **merged}
    return JSONResponse({"object": "list", "data": list(merged.values())})


@router.get("/metrics", tags=["operations"], response_class=PlainTextResponse)
def metrics(gateway: Shared) -> Response:
    """Prometheus' text format: the gateway's, the process's, and those of an engine in it."""
    text = generate_latest(gateway.metrics) + generate_latest(REGISTRY)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@operators.get("/backends", **answering(list[ShownBackend], 403))
def backends(gateway: Shared) -> list[dict[str, Any]]:
    """Every backend as the gateway sees it."""
    return [_shown(backend) for backend in gateway.fleet.backends]


@operators.post("/drain", **answering(ShownBackend, 403, 404, 413, 422))
def drain(gateway: Shared, which: BackendName) -> dict[str, Any]:
    """Send nothing new to a backend; what it has goes on. It is idle at ``in_flight`` 0."""
    return _shown(_set_draining(gateway, which, True))


@operators.post("/undrain", **answering(ShownBackend, 403, 404, 413, 422))
def undrain(gateway: Shared, which: BackendName) -> dict[str, Any]:
    """Let a backend take requests again."""
    return _shown(_set_draining(gateway, which, False))


router.include_router(operators)
HELLO = [{"role": "user", "content": "Hello"}]


@router.post("/v1/chat/completions", tags=["openai"], **relaying("messages", HELLO))
@router.post("/v1/completions", tags=["openai"], **relaying("prompt", "Hello"))
@router.post("/v1/embeddings", tags=["openai"], **relaying("input", "Hello"))
@router.post("/v1/responses", tags=["openai"], **relaying("input", "Hello"))
def relayed() -> Response:
    """Relayed to a backend as it comes, JSON or server-sent events; see vLLM for the fields."""
    raise RefusedByGateway(
        Failure(501, "not_relayed", "Start the gateway by `proofserve gateway`: it does the relay.")
    )


def _set_draining(gateway: Gateway, which: BackendName, draining: bool) -> Backend:
    backend = gateway.fleet.named(which.backend)
    if backend is None:
        names = ", ".join(each.name for each in gateway.fleet.backends)
        message = f"There is no backend {which.backend!r:.200}; there are {names}."
        raise RefusedByGateway(Failure(404, "unknown_backend", message, param="backend"))
    backend.draining = draining
    return backend


def _shown(backend: Backend) -> dict[str, Any]:
    return {
        "backend": backend.name,
        "weight": backend.spec.weight,
        "healthy": backend.healthy,
        "resting": backend.resting,
        "draining": backend.draining,
        "in_flight": backend.outstanding,
        "connections": backend.pool.opened,
        "models": sorted(backend.models) if backend.models is not None else None,
    }
