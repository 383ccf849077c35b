"""Which error answers with which status, and the route class that answers every failure itself.

The router lives in vLLM's application, whose error handlers are not ours: no exception of our
routes may reach them.
"""

import logging
import re
from collections.abc import Callable
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from proofserve.api.access import ANONYMOUS, Caller, Role
from proofserve.api.errors import (
    ApiError,
    BodyLost,
    BodyTooLarge,
    ClaimsMismatch,
    ClientGone,
    DeploymentMismatch,
    KeyMissing,
    LaneMissing,
    NotAllowed,
    NotEnabled,
    NotReady,
    TooMany,
)
from proofserve.api.json_body import has_upgraded_body, read_body
from proofserve.api.node import Node
from proofserve.protocol.errors import ProtocolError
from proofserve.rounds.errors import (
    ChatBusy,
    EngineFault,
    EngineGone,
    LaneUnset,
    NotInitialised,
    OutboxUnavailable,
    QueueFull,
    Refused,
    ShuttingDown,
    UnknownJob,
)
from proofserve.web.request_ids import RequestIds
from proofserve.wire.protocols import problems

_logger = logging.getLogger(__name__)

# The first row whose class fits decides.
_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (BodyLost, 400),
    (ClaimsMismatch, 400),
    (LaneMissing, 400),
    (LaneUnset, 400),
    (NotInitialised, 400),
    (KeyMissing, 401),
    (NotAllowed, 403),
    (UnknownJob, 404),
    (DeploymentMismatch, 409),
    (BodyTooLarge, 413),
    (RequestValidationError, 422),
    (ProtocolError, 422),
    (TooMany, 429),
    (QueueFull, 429),
    (ShuttingDown, 503),
    (Refused, 409),
    (ClientGone, 499),
    (NotEnabled, 503),
    (NotReady, 503),
    (ChatBusy, 503),
    (EngineGone, 503),
    (EngineFault, 503),
    (OutboxUnavailable, 503),
)
_KNOWN: tuple[type[Exception], ...] = (HTTPException, *(kind for kind, _ in _STATUS))
# A full queue has probably moved on by then. Seconds.
_QUEUE_MOVES_S = "5"
# A viewer's key permits these. Monitoring sends them often: only their refusals are logged.
_READING = {"GET", "HEAD"}
_WORD_BORDER = re.compile(r"(?<=[a-z])(?=[A-Z])")


class ClosingRoute(APIRoute):
    """A route that closes the connection after a request whose body uvicorn may lose."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """The handler of this route's requests."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            response: Response = await handle(request)
            if has_upgraded_body(request):
                response.headers["Connection"] = "close"
            return response

        return answer


def guarded(get_node: Callable[[Request], Node], needs_key: bool = True) -> type[APIRoute]:
    """A route class that admits permitted callers and answers every failure itself.

    A viewer's key permits GET and HEAD; other calls need an operator's. Without ``needs_key``
    every client may call. 503 while proofs are not enabled.
    """
    ids = RequestIds()

    class NodeRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            handle = super().get_route_handler()
            role = Role.VIEWER if self.methods <= _READING else Role.OPERATOR
            has_nonces = _takes_nonces(self.dependant)

            async def answer(request: Request) -> Response:
                node = reason = None
                try:
                    node = get_node(request)
                    caller = node.access.admit(request, role) if needs_key else ANONYMOUS
                    response: Response = await handle(
                        await _with_body(node, caller, request, has_nonces)
                    )
                except _KNOWN as error:
                    response, reason = explained(error), reason_of(error)
                except Exception:
                    _logger.exception("%s %s failed", request.method, request.url.path)
                    response = JSONResponse({"detail": "Internal server error"}, 500)
                    reason = "internal"
                if has_upgraded_body(request):
                    response.headers["Connection"] = "close"
                account(node, request, response, _id_of(request, ids), reason)
                return response

            return answer

    return NodeRoute


async def _with_body(node: Node, caller: Caller, request: Request, has_nonces: bool) -> Request:
    """Check whether an admitted caller may go on, and read the body of its request."""
    if not node.deployment.enabled:
        raise NotEnabled("PoC not enabled")
    node.rates.count(caller)
    limits = node.deployment
    return await read_body(request, limits.max_body_bytes, limits.max_nonces if has_nonces else 0)


def explained(error: Exception) -> JSONResponse:
    """The response for ``error``, whose class is in the table."""
    if isinstance(error, HTTPException):
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)
    status = next(code for kind, code in _STATUS if isinstance(error, kind))
    headers = error.headers if isinstance(error, ApiError) else None
    if isinstance(error, QueueFull):
        headers = {"Retry-After": _QUEUE_MOVES_S}
    return JSONResponse({"detail": _detail(error)}, status, headers)


def _id_of(request: Request, ids: RequestIds) -> str:
    given = request.headers.get("x-request-id")
    return ids.of(given.encode("latin-1") if given is not None else None).decode()


def _takes_nonces(dependant: Dependant) -> bool:
    bodies = (each.field_info.annotation for each in dependant.body_params)
    return any("nonces" in getattr(body, "model_fields", ()) for body in bodies)


def _detail(error: Exception) -> Any:
    if isinstance(error, RequestValidationError):
        return problems(error.errors())
    if isinstance(error, ProtocolError):
        loc = ("body", *error.field.split("."))
        return problems([{"type": "value_error", "loc": loc, "msg": str(error)}])
    if isinstance(error, ApiError):
        return error.detail
    return "Engine not available" if isinstance(error, EngineGone) else str(error)


def reason_of(error: Exception) -> str:
    """The label of an error: ``QueueFull`` is ``queue_full``."""
    return _WORD_BORDER.sub("_", type(error).__name__).lower().removesuffix("_error")


def account(
    node: Node | None, request: Request, response: Response, request_id: str, reason: str | None
) -> None:
    """Count and log ``response``, and give it the request's id.

    ``reason`` says why the request was refused; None if it was served.
    Request bodies, headers and response bodies are not logged: they may hold keys.
    """
    response.headers["X-Request-Id"] = request_id
    if node is not None and reason is not None:
        node.refusals[response.status_code, reason] += 1
    if reason is None and request.method in _READING:
        return
    spec = node.manager.status().spec if node is not None else None
    round_id = spec.round_id if spec is not None else None
    _logger.log(
        logging.INFO if response.status_code < 500 else logging.WARNING,
        "request %s, round %s: %s %s: %d %s",
        request_id,
        round_id,
        request.method,
        request.url.path,
        response.status_code,
        reason or "served",
        extra={"request_id": request_id, "round_id": round_id},
    )
