"""From a request to its response: the caller, the body, and the status of each error.

Our routes belong to vLLM's application: no exception of theirs may reach vLLM's error handlers.

Bodies are JSON, bounded in bytes and in values, and parsed strictly. Python's own parser also
accepts UTF-16, byte order marks and halves of surrogate pairs. Every parser holds the event loop
for seconds while it makes millions of small objects, so the values of a body are counted before it
is parsed (ADR 16 has the figures).
"""

import logging
import re
from collections.abc import Callable, Mapping

import numpy as np
from fastapi import APIRouter, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from proofserve.api.access import READING, ApiError, Caller, role_for
from proofserve.api.node import CALLER, NODE, Node
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import SigningKey
from proofserve.rounds.errors import EngineGone, Refusal, Refused, RoundsError
from proofserve.web import Handle, StrictJsonRequest, request_id_of, route_class, with_body
from proofserve.wire import PROOFS
from proofserve.wire.records import problems
from proofserve.wire.signed import ANSWER_HEADER, answer_header

_logger = logging.getLogger(__name__)

_KNOWN = (HTTPException, ApiError, RequestValidationError, ProtocolError, RoundsError)


def proof_router(get_node: Callable[[Request], Node], has_keys: bool) -> APIRouter:
    """A router for guarded routes. The OpenAPI page declares keys if the server ``has_keys``."""
    # For the OpenAPI page only: the route class itself checks the key, before the body.
    said = "An operator's, a validator's or a viewer's key."
    key = Security(HTTPBearer(auto_error=False, description=said))
    return APIRouter(
        prefix=PROOFS,
        tags=["proofs"],
        route_class=guarded(get_node),
        dependencies=[key] if has_keys else [],
    )


def guarded(
    get_node: Callable[[Request], Node], without_key: Caller | None = None
) -> type[APIRoute]:
    """A route class that admits permitted callers and turns every exception into a response.

    ``access.role_for`` says whose key a route needs. With ``without_key`` every client may call,
    and all are counted as that caller. 503 while proofs are not enabled.
    """

    def around(route: APIRoute, handle: Handle) -> Handle:
        role = role_for(route.methods, route.path)
        bodies = (each.field_info.annotation for each in route.dependant.body_params)
        has_nonces = any("nonces" in getattr(body, "model_fields", ()) for body in bodies)

        async def answer(request: Request) -> Response:
            node = reason = None
            try:
                node = request.scope[NODE] = get_node(request)
                caller = without_key or node.access.admit(request, role)
                request.scope[CALLER] = caller
                read = await _with_body(node, caller, request, has_nonces)
                response = await handle(read)
                # The page's events have no end that could be signed.
                is_stream = isinstance(response, StreamingResponse)
                if node.key is not None and without_key is None and not is_stream:
                    await _sign(node.key, read, response)
            except _KNOWN as error:
                response, reason = error_response(error), reason_of(error)
            except Exception:
                _logger.exception("%s %s failed", request.method, request.url.path)
                response = JSONResponse({"detail": "Internal server error"}, 500)
                reason = "internal"
            close_if_upgraded(request, response)
            count_and_log(node, request, response, reason)
            return response

        return answer

    return route_class(around)


async def _with_body(node: Node, caller: Caller, request: Request, has_nonces: bool) -> Request:
    """Count the request of an admitted caller, and read its body. Raises ApiError."""
    limits = node.deployment
    if not limits.enabled:
        raise ApiError("not_enabled", "PoC not enabled")
    node.call_limits.count(caller)
    return await read_body(request, limits.max_body_bytes, limits.max_nonces if has_nonces else 0)


async def _sign(key: SigningKey, request: Request, response: Response) -> None:
    """Sign what the node answers, for a third party to whom its client shows it."""
    path, query = request.scope["raw_path"].decode("latin-1"), request.url.query
    target = f"{path}?{query}" if query else path
    asked, said = await request.body(), bytes(response.body)
    response.headers[ANSWER_HEADER] = answer_header(key, request.method, target, asked, said)


# -- bodies ----------------------------------------------------------------------------------------

# JSON values for one nonce in a body: the nonce, and its claim, an object with two fields.
_VALUES_PER_NONCE = 4
# Values of the other fields, with room for unknown fields that the error names.
_OTHER_VALUES = 1024
# Limit of a body without a list of nonces: several times its longest texts, even if escaped.
_BYTES_WITHOUT_LIST = 256 * 1024
# Bytes that are counted at a time: temporary arrays stay small, and counting ends early.
_SLICE = 2**20
# Every value but the first of its list or object has a comma before it.
_COMMA, _LIST, _OBJECT, _QUOTE = b',[{"'


async def read_body(request: Request, max_bytes: int, nonces: int) -> StrictJsonRequest:
    """Read the body of ``request``: at most ``max_bytes``, and values for ``nonces`` nonces.

    Raises ApiError: as soon as the body is known to be larger, or if body or client are lost.
    """
    setting = "POC_MAX_BODY_BYTES"
    if not nonces and max_bytes > _BYTES_WITHOUT_LIST:
        max_bytes, setting = _BYTES_WITHOUT_LIST, "this call takes no list"
    read = await with_whole_body(request, max_bytes, setting)
    body = await read.body()
    if holds_more_values(body, nonces * _VALUES_PER_NONCE + _OTHER_VALUES):
        need = f"{nonces} nonces need (POC_MAX_QUEUED_NONCES)" if nonces else "this call takes"
        raise ApiError("body_too_large", f"the body has more values than {need}")
    return read


async def with_whole_body(
    request: Request, max_bytes: int, setting: str = "POC_MAX_BODY_BYTES"
) -> StrictJsonRequest:
    """``request`` with its body. Raises as ``read_body``."""
    too_large = ApiError("body_too_large", f"the body has more than {max_bytes} bytes ({setting})")
    try:
        read = await with_body(request, max_bytes, too_large)
    except ClientDisconnect:
        raise ApiError("client_gone", "Client closed request") from None
    if not await read.body() and has_upgraded_body(request):
        raise ApiError(
            "body_lost",
            "the body was lost, because the request asks for Connection: Upgrade: send it again"
            " without Upgrade (curl --http1.1, Java HttpClient.Version.HTTP_1_1)",
        )
    return read


def close_if_upgraded(request: Request, response: Response) -> None:
    """Close the connection after a request whose body uvicorn may lose."""
    if has_upgraded_body(request):
        response.headers["Connection"] = "close"


def has_upgraded_body(request: Request) -> bool:
    """Whether the request asks for ``Connection: Upgrade`` and announces a body.

    uvicorn with httptools loses such a body, and reads what arrives of it later as the next
    request; the connection must be closed after the response (ADR 16).
    """
    headers = request.headers
    tokens = ",".join(headers.getlist("connection")).lower().split(",")
    announced = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    return announced and "upgrade" in (token.strip() for token in tokens)


def holds_more_values(body: bytes, limit: int) -> bool:
    """Whether ``body`` has more than ``limit`` JSON values outside strings, without parsing it."""
    if len(body) <= limit:
        return False
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    data = np.frombuffer(body, np.uint8)
    values = quotes = 0
    for start in range(0, data.size, _SLICE):
        part = data[start : start + _SLICE]
        begins = (part == _COMMA) | (part == _LIST) | (part == _OBJECT)
        borders = np.flatnonzero(part == _QUOTE)
        if borders.size:
            quotes_before = np.searchsorted(borders, np.flatnonzero(begins)) + quotes
            values += int(np.count_nonzero(quotes_before % 2 == 0))
            quotes += borders.size
        elif quotes % 2 == 0:
            values += int(np.count_nonzero(begins))
        if values > limit or quotes > 2 * limit:
            return True
    return False


# -- errors ----------------------------------------------------------------------------------------

# Retry-After, in seconds: by then a full queue probably has room, and a receipt is in the log.
_RETRY_S: Mapping[str, float] = {
    Refusal.QUEUE_FULL: 5,
    Refusal.WAITS_FULL: 5,
    Refusal.RECEIPT_NOT_LOGGED: 1,
}
_WORD_BORDER = re.compile(r"(?<=[a-z])(?=[A-Z])")


def error_response(error: Exception) -> JSONResponse:
    """The response for ``error``: its own status, or that of its reason in the table."""
    if isinstance(error, Refused):
        error = ApiError(error.reason, str(error), _RETRY_S.get(error.reason))
    if isinstance(error, HTTPException):
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)
    if isinstance(error, ApiError):
        return JSONResponse({"detail": error.detail}, error.status, error.headers)
    if isinstance(error, RoundsError):
        # A subclass, such as a fleet's, says what can be done.
        text = "Engine not available" if type(error) is EngineGone else str(error)
        return JSONResponse({"detail": text}, 503)
    if isinstance(error, RequestValidationError):
        return JSONResponse({"detail": problems(error.errors())}, 422)
    field = error.field if isinstance(error, ProtocolError) else ""
    found = {"type": "value_error", "loc": ("body", *field.split(".")), "msg": str(error)}
    return JSONResponse({"detail": problems([found])}, 422)


def reason_of(error: Exception) -> str:
    if isinstance(error, ApiError | Refused):
        return error.reason
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
