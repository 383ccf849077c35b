"""The gateway's own endpoints, and the declarations of the relayed ones, which ``http`` serves."""

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from pydantic import BaseModel, Field

from proofserve.gateway.admin import dashboard_routes
from proofserve.gateway.admin.admin_access import AdminRoute
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
from proofserve.gateway.admin.receipt_routes import receipts
from proofserve.gateway.backends.fleet import Backend
from proofserve.gateway.failures import NOT_IMPLEMENTED, UNAUTHORIZED, Failure, RefusedByGateway
from proofserve.gateway.records import GatewayPlan
from proofserve.gateway.relay.gateway import Gateway
from proofserve.web import bearer_key


class BackendName(BaseModel, extra="forbid", strict=True):
    """The backend that an operator drains or undrains."""

    backend: str = Field(description="Its URL, as GET /admin/backends shows it.")


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.state.gateway
    return gateway


Shared = Annotated[Gateway, Depends(gateway_of)]


public = APIRouter()
openai = APIRouter(prefix="/v1", tags=["openai"])
operators = APIRouter(prefix="/admin", tags=["operations"], route_class=AdminRoute)


def include_routes(app: FastAPI, plan: GatewayPlan) -> None:
    """Add all endpoints. The OpenAPI page asks for a key only where ``plan`` has one."""
    app.include_router(public)
    of_clients = [CLIENTS] if plan.clients else []
    app.include_router(openai, dependencies=of_clients)
    app.include_router(receipts, dependencies=of_clients)
    app.include_router(operators, dependencies=[ADMIN] if plan.admin_key is not None else [])
    if plan.dashboard:
        app.include_router(dashboard_routes.router())


@public.get("/v1/health", tags=["health"], **answering(Health, unavailable=Draining))
@public.get("/health", tags=["health"], **answering(Health, unavailable=Draining))
def health(gateway: Shared) -> JSONResponse:
    """Whether the gateway accepts new requests; 503 once a shutdown has begun."""
    if gateway.draining:
        return JSONResponse({"status": "draining"}, HTTPStatus.SERVICE_UNAVAILABLE)
    return JSONResponse({"status": "ok"})


@public.get("/health/ready", tags=["health"], **answering(Ready, unavailable=NotReadyModel))
def ready(gateway: Shared) -> JSONResponse:
    """The backends that can take a request; 503 if there is none."""
    usable = [b.name for b in gateway.fleet.backends if b.healthy and not b.draining]
    if gateway.draining or not usable:
        body = {"status": "draining" if gateway.draining else "no backend", "backends": usable}
        return JSONResponse(body, HTTPStatus.SERVICE_UNAVAILABLE)
    return JSONResponse({"status": "ok", "backends": usable})


@openai.get("/models", **answering(Models, 401))
def models(gateway: Shared, request: Request) -> JSONResponse:
    """The models of all backends that are up, each once."""
    if gateway.clients.find(bearer_key(request.scope["headers"])) is None:
        raise RefusedByGateway(UNAUTHORIZED)
    merged: dict[str, Any] = {}
    for backend in gateway.fleet.backends:
        if backend.healthy and not backend.draining:
            merged = {**(backend.models or {}), **merged}
    return JSONResponse({"object": "list", "data": list(merged.values())})


@public.get("/metrics", tags=["operations"], response_class=PlainTextResponse)
def metrics(gateway: Shared) -> Response:
    """Metrics of the gateway, its process and an embedded engine, in Prometheus' text format."""
    text = generate_latest(gateway.metrics) + generate_latest(REGISTRY)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@operators.get("/backends", **answering(list[ShownBackend], 403))
def backends(gateway: Shared) -> list[dict[str, Any]]:
    """The state of every backend."""
    return [_shown(backend) for backend in gateway.fleet.backends]


@operators.post("/drain", **answering(ShownBackend, 403, 404, 413, 422))
def drain(gateway: Shared, which: BackendName) -> dict[str, Any]:
    """Send no new requests to a backend. The backend is idle once ``in_flight`` is 0."""
    return _shown(_set_draining(gateway, which, True))


@operators.post("/undrain", **answering(ShownBackend, 403, 404, 413, 422))
def undrain(gateway: Shared, which: BackendName) -> dict[str, Any]:
    """Send requests to a backend again."""
    return _shown(_set_draining(gateway, which, False))


HELLO = [{"role": "user", "content": "Hello"}]


@openai.post("/chat/completions", **relaying(HELLO, "messages"))
@openai.post("/completions", **relaying("Hello", "prompt", "prompt_embeds"))
@openai.post("/embeddings", **relaying("Hello", "input", "messages"))
@openai.post("/responses", **relaying("Hello", "input"))
def relayed() -> Response:
    """Relayed to a backend, which answers with JSON or server-sent events; see vLLM's API."""
    raise RefusedByGateway(
        NOT_IMPLEMENTED.saying("This server runs the gateway without GatewayProtocol, its relay.")
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
