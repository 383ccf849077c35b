"""The status of each error, and a route class that turns every exception into a response.

Our routes belong to vLLM's application: no exception of theirs may reach vLLM's error handlers.
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

from proofserve.api.access import READING, Caller, role_for
from proofserve.api.errors import ApiError, NotEnabled
from proofserve.api.json_body import has_upgraded_body, read_body
from proofserve.api.node import CALLER, NODE, Node
from proofserve.protocol.errors import ProtocolError
from proofserve.rounds.errors import (
    EngineGone,
    LaneUnset,
    NotInitialised,
    QueueFull,
    ReceiptDeleted,
    ReceiptNotLogged,
    Refused,
    RoundsError,
    ShuttingDown,
    UnknownJob,
    UnknownNonce,
    UnknownReceipt,
    UnknownRound,
    VectorsDeleted,
)
from proofserve.web import request_id_of
from proofserve.wire.protocols import problems

_logger = logging.getLogger(__name__)

# The status of errors from other packages; the first row with a class of the error decides.
_STATUS = (
    ((LaneUnset, NotInitialised), 400),
    ((UnknownJob, UnknownRound, UnknownNonce, UnknownReceipt), 404),
    ((VectorsDeleted, ReceiptDeleted), 410),
    ((RequestValidationError, ProtocolError), 422),
    (ReceiptNotLogged, 425),
    (QueueFull, 429),
    (ShuttingDown, 503),
    (Refused, 409),
    (RoundsError, 503),
)
_KNOWN = (HTTPException, ApiError, RequestValidationError, ProtocolError, RoundsError)
# Retry-After, in seconds: by then a full queue probably has room, and a receipt is in the log.
_RETRY_S = ((QueueFull, "5"), (ReceiptNotLogged, "1"))
_WORD_BORDER = re.compile(r"(?<=[a-z])(?=[A-Z])")


class ClosingRoute(APIRoute):
    """A route that closes the connection after a request whose body uvicorn may lose."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            response: Response = await handle(request)
            if has_upgraded_body(request):
                response.headers["Connection"] = "close"
            return response

        return answer


def guarded(
    get_node: Callable[[Request], Node], without_key: Caller | None = None
) -> type[APIRoute]:
    """A route class that admits permitted callers and turns every exception into a response.

    ``access.role_for`` says whose key a route needs. With ``without_key`` every client may call,
    and all are counted as that caller. 503 while proofs are not enabled.
    """

    class NodeRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            handle = super().get_route_handler()
            role = role_for(self.methods, self.path)
            has_nonces = _takes_nonces(self.dependant)

            async def answer(request: Request) -> Response:
                node = reason = None
                try:
                    node = request.scope[NODE] = get_node(request)
                    caller = without_key or node.access.admit(request, role)
                    request.scope[CALLER] = caller
                    response: Response = await handle(
                        await _with_body(node, caller, request, has_nonces)
                    )
                except _KNOWN as error:
                    response, reason = error_response(error), reason_of(error)
                except Exception:
                    _logger.exception("%s %s failed", request.method, request.url.path)
                    response = JSONResponse({"detail": "Internal server error"}, 500)
                    reason = "internal"
                if has_upgraded_body(request):
                    response.headers["Connection"] = "close"
                count_and_log(node, request, response, reason)
                return response

            return answer

    return NodeRoute


async def _with_body(node: Node, caller: Caller, request: Request, has_nonces: bool) -> Request:
    """Count the request of an admitted caller, and read its body. Raises ApiError."""
    if not node.deployment.enabled:
        raise NotEnabled("PoC not enabled")
    node.rates.count(caller)
    limits = node.deployment
    return await read_body(request, limits.max_body_bytes, limits.max_nonces if has_nonces else 0)


def error_response(error: Exception) -> JSONResponse:
    """The response for ``error``: its own status, or that of its class in the table."""
    if isinstance(error, HTTPException):
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)
    if isinstance(error, ApiError):
        return JSONResponse({"detail": error.detail}, error.status, error.headers)
    status = next(code for kind, code in _STATUS if isinstance(error, kind))
    after = next((seconds for kind, seconds in _RETRY_S if isinstance(error, kind)), None)
    headers = {"Retry-After": after} if after else None
    return JSONResponse({"detail": _detail(error)}, status, headers)


def _takes_nonces(dependant: Dependant) -> bool:
    bodies = (each.field_info.annotation for each in dependant.body_params)
    return any("nonces" in getattr(body, "model_fields", ()) for body in bodies)


def _detail(error: Exception) -> Any:
    if isinstance(error, RequestValidationError):
        return problems(error.errors())
    if isinstance(error, ProtocolError):
        loc = ("body", *error.field.split("."))
        return problems([{"type": "value_error", "loc": loc, "msg": str(error)}])
    # A subclass, such as a fleet's, says what can be done.
    return "Engine not available" if type(error) is EngineGone else str(error)


def reason_of(error: Exception) -> str:
    return _WORD_BORDER.sub("_", type(error).__name__).lower().removesuffix("_error")


def count_and_log(
    node: Node | None, request: Request, response: Response, reason: str | None
) -> None:
    """Count and log ``response``, and give it the request's id.

    ``reason`` says why the request was refused; None if it was served.
    Bodies and headers are not logged, because they may hold keys.
    """
    given = request.headers.get("x-request-id")
    request_id = request_id_of(given.encode("latin-1") if given is not None else None).decode()
    response.headers["X-Request-Id"] = request_id
    if node is not None and reason is not None:
        node.refusals[response.status_code, reason] += 1
    # Monitors read often, so only refused calls of theirs are logged.
    if reason is None and request.method in READING:
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
