"""Which error answers with which status: one table, used by our own routes only.

The router lives in an application whose error handlers are somebody else's, so nothing that our
routes raise may get that far.
"""

import logging
from collections.abc import Callable
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from proofserve.api.access import Role
from proofserve.api.accounts import account, reason_of
from proofserve.api.bounds import bounded
from proofserve.api.errors import (
    ApiError,
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
from proofserve.api.node import Node
from proofserve.protocol.errors import ProtocolError
from proofserve.rounds.errors import (
    ChatBusy,
    EngineFault,
    EngineGone,
    LaneUnset,
    NoRound,
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
    (ClaimsMismatch, 400),
    (LaneMissing, 400),
    (LaneUnset, 400),
    (NotInitialised, 400),
    (NoRound, 400),
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
# A full queue has moved by then, most likely. Seconds.
_QUEUE_MOVES_S = "5"
# Whoever may only look may use these.
_LOOKING = {"GET", "HEAD"}


def guarded(get_node: Callable[[Request], Node]) -> type[APIRoute]:
    """A route class that lets in who may, and answers every failure itself.

    Everything that does not merely look is for operators. 503 while proofs are not enabled.
    """

    ids = RequestIds()

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            handle = super().get_route_handler()
            role = Role.VIEWER if self.methods <= _LOOKING else Role.OPERATOR
            lists = _takes_nonces(self.dependant)

            async def answer(request: Request) -> Response:
                node = reason = None
                try:
                    # Before the body is looked at: neither a stranger nor a disabled server has
                    # anything to do with it.
                    node = get_node(request)
                    caller = node.access.admit(request, role)
                    _require_enabled(node)
                    node.rates.count(caller)
                    most = node.deployment
                    nonces = most.max_nonces if lists else 0
                    whole = await bounded(request, most.max_body_bytes, nonces)
                    response: Response = await handle(whole)
                except _KNOWN as error:
                    response, reason = explained(error), reason_of(error)
                except Exception:
                    _logger.exception("%s %s failed", request.method, request.url.path)
                    response = JSONResponse({"detail": "Internal server error"}, 500)
                    reason = "internal"
                request_id = _id_of(request, ids)
                response.headers["X-Request-Id"] = request_id
                account(node, request, response, request_id, reason)
                return response

            return answer

    return GuardedRoute


def explained(error: Exception) -> JSONResponse:
    """The answer that tells a client of ``error``, which is of a kind in the table."""
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


def _require_enabled(node: Node) -> None:
    if not node.deployment.enabled:
        raise NotEnabled("PoC not enabled")


def _detail(error: Exception) -> Any:
    if isinstance(error, RequestValidationError):
        return problems(error.errors())
    if isinstance(error, ProtocolError):
        loc = ("body", *error.field.split("."))
        return problems([{"type": "value_error", "loc": loc, "msg": str(error)}])
    if isinstance(error, ApiError):
        return error.detail
    return "Engine not available" if isinstance(error, EngineGone) else str(error)
