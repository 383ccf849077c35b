"""``GET /v1/receipts/{id}``: the receipts of an answer, from the backend that gave it."""

from typing import Annotated
from urllib.parse import quote

import httpx
from fastapi import APIRouter, Path, Request, Response

from proofserve.gateway.admin.openapi import Receipts, answering
from proofserve.gateway.backends.fleet import Backend
from proofserve.gateway.backends.plain_client import plain_client
from proofserve.gateway.failures import (
    FIRST_BYTE_TIMEOUT,
    UNAUTHORIZED,
    UNKNOWN_RECEIPT,
    UNREACHABLE,
    RefusedByGateway,
)
from proofserve.gateway.relay.gateway import Gateway
from proofserve.web import bearer_key

# A node waits 2 s for a receipt that it does not know yet.
TIMEOUT_S = 10.0
STATUSES = (401, 404, 410, 422, 425, 429, 502, 503, 504)
# Headers of the backend's answer that are passed on.
_PASSED = ("content-type", "retry-after")
_LONGEST_ID = 512

receipts = APIRouter(prefix="/v1", tags=["receipts"])
ResponseId = Annotated[
    str, Path(max_length=_LONGEST_ID, description="The `id` of the answer, as chatcmpl-….")
]


@receipts.get("/receipts/{response_id:path}", **answering(Receipts, *STATUSES))
async def receipts_of(request: Request, response_id: ResponseId) -> Response:
    """The signed receipts of an answer that this key got, as the node gives them.

    404 for an answer of another key, and for one that this gateway has forgotten. 425 with
    Retry-After until the node's log has the receipt; 410 after the receipt's time to live.
    """
    gateway: Gateway = request.state.gateway
    client = gateway.clients.find(bearer_key(request.scope["headers"]))
    if client is None:
        raise RefusedByGateway(UNAUTHORIZED)
    name = gateway.answered.backend_of(response_id, client.name)
    backend = gateway.fleet.named(name) if name is not None else None
    if backend is None:
        raise RefusedByGateway(UNKNOWN_RECEIPT)
    found = await _ask(gateway, backend, response_id)
    headers = {each: found.headers[each] for each in _PASSED if each in found.headers}
    return Response(found.content, found.status_code, headers)


async def _ask(gateway: Gateway, backend: Backend, response_id: str) -> httpx.Response:
    path = f"{gateway.plan.receipts_path}/{quote(response_id, safe='')}"
    # A client for each request: they are few beside answers, and nothing has to be closed later.
    try:
        async with plain_client(backend.spec, gateway.plan.backend_key, TIMEOUT_S) as http:
            return await http.get(path)
    except httpx.TimeoutException:
        raise RefusedByGateway(FIRST_BYTE_TIMEOUT) from None
    except httpx.HTTPError:
        raise RefusedByGateway(UNREACHABLE) from None
