"""The gateway's own endpoints and its OpenAPI page, which also lists those that it relays."""

import hmac
from typing import Annotated, Any, Literal
from urllib.parse import quote

import httpx
from fastapi import APIRouter, Depends, FastAPI, Request, Response, Security
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from proofserve.dashboard import routes
from proofserve.gateway import failures
from proofserve.gateway.backends import Backend, plain_client
from proofserve.gateway.failures import Failure, RefusedByGateway
from proofserve.gateway.gateway import ROUTES, Gateway, Route
from proofserve.gateway.records import GatewayPlan
from proofserve.web import (
    Handle,
    ResponseId,
    bearer_key,
    client_key,
    route_class,
    why_not_local,
    with_body,
)

Arguments = dict[Any, Any]

_DRAINING = "The gateway is shutting down."
_NOT_READY = "The gateway serves no requests: it shuts down, or no backend is up."

# Limit of an operator's body, which only names a backend.
MAX_BYTES = 64 * 1024
# A node waits 2 s for a receipt that it does not know yet.
_RECEIPT_TIMEOUT_S = 10.0
_RECEIPT_STATUSES = (401, 404, 410, 422, 425, 429, 502, 503, 504)
# Only for the page: the endpoints check the keys themselves.
CLIENTS = Security(HTTPBearer(scheme_name="client", auto_error=False, description="A client key."))
ADMIN = Security(HTTPBearer(scheme_name="admin", auto_error=False, description="The admin key."))

_REASONS: dict[int | str, str] = {
    400: "the request is not valid HTTP, its body is not a JSON object or has a field of a wrong"
    " type, or it may cost more tokens than the key has per minute",
    401: "no client has this key",
    403: "only operators may do this",
    404: "there is no such model or backend, or this key got no such answer",
    408: "the request did not arrive in time",
    410: "the receipt is deleted: its time to live has passed",
    413: "the body is too large",
    422: "a field is wrong; its name is in param",
    425: "the receipt is not in the node's log yet; Retry-After says when to try again",
    429: "a limit of the key is reached; Retry-After says when to try again",
    431: "the request has too many headers, or too large ones",
    501: "the gateway does not support this method",
    502: "the backend refuses connections, closed early, or does not answer in HTTP",
    503: "the queue is full, the wait for a permit was too long, no backend takes requests, or the"
    " gateway is shutting down; Retry-After says when to try again",
    504: "the backend took too long",
}


def refusal_of(plan: GatewayPlan, connection: HTTPConnection) -> Failure | None:
    """Why a client may not operate the gateway of ``plan``; None if it may."""
    if plan.admin_key is None:
        reason = why_not_local(connection)
        if reason is None:
            return None
        message = (
            f"Without VLLM_GATEWAY_ADMIN_KEY only clients on this machine may do this: {reason}."
        )
    else:
        given = bearer_key(connection.scope["headers"])
        if given and hmac.compare_digest(given, plan.admin_key.encode()):
            return None
        message = "This needs the admin key: send it as 'Authorization: Bearer KEY'."
    return Failure(403, "admin_only", message)


def admin_only(app: ASGIApp, plan: GatewayPlan) -> ASGIApp:
    """``app`` for operators alone, except for paths with keys of their own (``self_guarded``)."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        answering = app
        # The decoded path, by which the application chooses the route.
        asks = scope["type"] == "http" and not scope["path"].startswith(plan.self_guarded)
        if asks and (failure := refusal_of(plan, HTTPConnection(scope))):
            answering = Response(failure.body(), failure.status, media_type="application/json")
        await answering(scope, receive, send)

    return guarded


def _for_operators(_route: APIRoute, handle: Handle) -> Handle:
    """Check that the client is an operator before its body is read, which is bounded."""

    async def answer(request: Request) -> Response:
        if failure := refusal_of(request.state.gateway.plan, request):
            raise RefusedByGateway(failure)
        try:
            bounded = await with_body(request, MAX_BYTES, RefusedByGateway(failures.BODY_TOO_LARGE))
        except ClientDisconnect:
            # The client has disconnected and does not read this answer.
            raise RefusedByGateway(failures.INVALID_BODY) from None
        return await handle(bounded)

    return answer


AdminRoute = route_class(_for_operators)


class Fault(BaseModel, extra="forbid"):
    """Why a request was refused; ``code`` is stable."""

    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"
    ]
    param: str | None
    code: str


class ErrorModel(BaseModel, extra="forbid"):
    """A refusal, in OpenAI's shape."""

    error: Fault


class BackendError(BaseModel, extra="allow"):
    """An error of the backend, passed on as it came. In vLLM's, ``error.code`` is a number."""

    error: dict[str, Any] | str | None = None


class Health(BaseModel, extra="forbid"):
    """Whether the gateway accepts new requests: it does not while it shuts down."""

    status: Literal["ok", "draining"]


class Ready(BaseModel, extra="forbid"):
    """``backends`` lists those that can take a request. Without any, or in a shutdown: 503."""

    status: Literal["ok", "draining", "no backend"]
    backends: list[str]


class Models(BaseModel, extra="forbid"):
    """The models of all backends that are up, as the backends describe them."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class Receipts(BaseModel, extra="allow"):
    """One signed receipt for each choice of the answer; docs/receipts.md has their fields."""

    receipts: list[dict[str, Any]]


class ShownBackend(BaseModel, extra="forbid"):
    """The state of a backend. ``models`` is null until the backend has listed them."""

    backend: str
    weight: float
    healthy: bool
    resting: bool
    draining: bool
    in_flight: int
    connections: int
    models: list[str] | None


def answering(
    answer: Any, *refusals: int, unavailable: str | None = None, refusal: Any = ErrorModel
) -> Arguments:
    """Arguments of a route that answers ``answer``, one of ``refusals``, or ``answer`` with 503."""
    responses = _errors(refusal, *refusals)
    if unavailable is not None:
        responses[503] = {"model": answer, "description": unavailable}
    return {"response_model": answer, "responses": responses}


def relaying(route: Route) -> Arguments:
    """Arguments of a relayed route."""
    unread = {"description": "Passed on, like every field that is not listed."}
    count = {"type": ["integer", "null"], "maximum": 2**31 - 1}
    fields: Arguments = {
        "model": {"type": ["string", "null"], "description": "As GET /v1/models names it."},
        **dict.fromkeys(route.prompts, unread),
        "stream": {"type": ["boolean", "null"]},
        "n": count,
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), count),
    }
    body = {
        "schema": {
            "type": "object",
            "properties": fields,
            "anyOf": [{"required": [prompt]} for prompt in route.prompts],
        },
        "example": {"model": "tiny", route.prompts[0]: route.example, "max_tokens": 16},
    }
    kind = "multipart/form-data" if route.form else "application/json"
    answers = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
    passed = {"description": "An error of the backend, as it came.", "model": BackendError}
    codes = (400, 401, 404, 408, 413, 429, 431, 501, 502, 503, 504)
    return {
        "response_model": None,
        "openapi_extra": {"requestBody": {"required": True, "content": {kind: body}}},
        "responses": {
            200: {"description": "The backend's answer.", "content": answers},
            **_errors(ErrorModel | BackendError, *codes),
            "4XX": passed,
            "5XX": passed,
        },
    }


def _errors(model: Any, *codes: int) -> Arguments:
    return {code: {"model": model, "description": _REASONS[code]} for code in codes}


class BackendName(BaseModel, extra="forbid", strict=True):
    """The backend that an operator drains or undrains."""

    # With a limit, halves of surrogate pairs are refused, too.
    backend: str = Field(
        max_length=MAX_BYTES, description="Its URL, as GET /admin/backends shows it."
    )


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.state.gateway
    return gateway


Shared = Annotated[Gateway, Depends(gateway_of)]
public = APIRouter()
openai = APIRouter(prefix="/v1", tags=["openai"])
operators = APIRouter(prefix="/admin", tags=["operations"], route_class=AdminRoute)
receipts = APIRouter(prefix="/v1", tags=["receipts"])


def include_routes(app: FastAPI, plan: GatewayPlan) -> None:
    """Add all endpoints. The OpenAPI page asks for a key only where ``plan`` has one."""
    app.include_router(public)
    of_clients = [CLIENTS] if plan.clients else []
    app.include_router(openai, dependencies=of_clients)
    for path, route in ROUTES.items():
        app.add_api_route(
            path.decode(),
            relayed,
            methods=["POST"],
            tags=["relayed"],
            dependencies=of_clients,
            **relaying(route),
        )
    app.include_router(receipts, dependencies=of_clients)
    app.include_router(operators, dependencies=[ADMIN] if plan.admin_key is not None else [])
    if plan.dashboard:
        app.include_router(routes.router(lambda request: request.state.dashboard, AdminRoute))


@public.get("/v1/health", tags=["health"], **answering(Health, unavailable=_DRAINING))
@public.get("/health", tags=["health"], **answering(Health, unavailable=_DRAINING))
def health(gateway: Shared, response: Response) -> Health:
    """Whether the gateway accepts new requests; 503 once a shutdown has begun."""
    if gateway.draining:
        response.status_code = 503
    return Health(status="draining" if gateway.draining else "ok")


@public.get("/health/ready", tags=["health"], **answering(Ready, unavailable=_NOT_READY))
def ready(gateway: Shared, response: Response) -> Ready:
    """The backends that can take a request; 503 if there is none."""
    usable = [b.name for b in gateway.pool.backends if b.healthy and not b.draining]
    status = "draining" if gateway.draining else "ok" if usable else "no backend"
    response.status_code = 200 if status == "ok" else 503
    return Ready(status=status, backends=usable)


@openai.get("/models", **answering(Models, 401))
def models(gateway: Shared, request: Request) -> Models:
    """The models of all backends that are up, each once."""
    if gateway.clients.find(client_key(request.scope["headers"])) is None:
        raise RefusedByGateway(failures.UNAUTHORIZED)
    merged: dict[str, Any] = {}
    for backend in gateway.pool.backends:
        if backend.healthy and not backend.draining:
            merged = {**(backend.models or {}), **merged}
    return Models(object="list", data=list(merged.values()))


@public.get("/metrics", tags=["operations"], response_class=PlainTextResponse)
def metrics(gateway: Shared) -> Response:
    """Metrics of the gateway, its process and an embedded engine, in Prometheus' text format."""
    text = generate_latest(gateway.metrics) + generate_latest(REGISTRY)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@operators.get("/backends", **answering(list[ShownBackend], 403))
def backends(gateway: Shared) -> list[ShownBackend]:
    """The state of every backend."""
    return [_shown(backend) for backend in gateway.pool.backends]


def _named(gateway: Shared, which: BackendName) -> Backend:
    backend = gateway.pool.named(which.backend)
    if backend is None:
        names = ", ".join(each.name for each in gateway.pool.backends)
        message = f"There is no backend {which.backend!r:.200}; there are {names}."
        raise RefusedByGateway(Failure(404, "unknown_backend", message, param="backend"))
    return backend


Named = Annotated[Backend, Depends(_named)]


@operators.post("/drain", **answering(ShownBackend, 400, 403, 404, 413, 422))
def drain(backend: Named) -> ShownBackend:
    """Send no new requests to a backend. The backend is idle once ``in_flight`` is 0."""
    backend.draining = True
    return _shown(backend)


@operators.post("/undrain", **answering(ShownBackend, 400, 403, 404, 413, 422))
def undrain(backend: Named) -> ShownBackend:
    """Send requests to a backend again."""
    backend.draining = False
    return _shown(backend)


def _shown(backend: Backend) -> ShownBackend:
    return ShownBackend(
        backend=backend.name,
        weight=backend.spec.weight,
        healthy=backend.healthy,
        resting=backend.resting,
        draining=backend.draining,
        in_flight=backend.outstanding,
        connections=backend.pool.opened,
        models=sorted(backend.models) if backend.models is not None else None,
    )


@receipts.get(
    "/receipts/{response_id:path}",
    **answering(Receipts, *_RECEIPT_STATUSES, refusal=ErrorModel | BackendError),
)
async def receipts_of(gateway: Shared, request: Request, response_id: ResponseId) -> Response:
    """The signed receipts of an answer that this key got, as the node gives them.

    404 for an answer of another key, and for one that this gateway has forgotten. 425 with
    Retry-After until the node's log has the receipt; 410 after the receipt's time to live.
    """
    client = gateway.clients.find(client_key(request.scope["headers"]))
    if client is None:
        raise RefusedByGateway(failures.UNAUTHORIZED)
    name = gateway.answered.backend_of(response_id, client.name)
    backend = gateway.pool.named(name) if name is not None else None
    if backend is None:
        raise RefusedByGateway(failures.UNKNOWN_RECEIPT)
    path = f"{gateway.plan.receipts_path}/{quote(response_id, safe='')}"
    # A client for each request: they are few beside answers, and nothing has to be closed later.
    try:
        async with plain_client(backend.spec, gateway.plan.backend_key, _RECEIPT_TIMEOUT_S) as http:
            found = await http.get(path)
    except httpx.TimeoutException:
        raise RefusedByGateway(failures.FIRST_BYTE_TIMEOUT) from None
    except httpx.HTTPError:
        raise RefusedByGateway(failures.UNREACHABLE) from None
    passed = ("content-type", "retry-after")
    headers = {each: found.headers[each] for each in passed if each in found.headers}
    return Response(found.content, found.status_code, headers)


def relayed() -> Response:
    """Relayed to a backend, which answers with JSON or server-sent events.

    https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html has the fields.
    """
    raise RefusedByGateway(
        failures.NOT_IMPLEMENTED.saying(
            "This server runs the gateway without GatewayProtocol, its relay."
        )
    )
