"""Calls of an API process that does not own the node go to the one that does, over a unix socket.

The owner serves the proof routes alone there (``private_app``). A request keeps its headers, and
the address of its client comes in a header of ours, so that the owner checks keys and addresses as
if the client had come to it.
"""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
from fastapi import APIRouter, FastAPI
from starlette.datastructures import URLPath
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, NoMatchFound
from starlette.types import ASGIApp, Receive, Scope, Send

from proofserve.api.access import READING, Access, role_for
from proofserve.api.errors import ApiError, BodyTooLarge, ClientGone, NotEnabled
from proofserve.api.node import while_connected
from proofserve.api.requests import (
    count_and_log,
    error_response,
    has_upgraded_body,
    reason_of,
    require_body,
)
from proofserve.dashboard.routes import SNAPSHOT
from proofserve.web import with_body
from proofserve.wire.paths import PROOFS, RECEIPTS
from proofserve.wiring.owner import Ownership

# The address of the client, in JSON. The process that passes a request on removes the client's own.
CLIENT = b"x-proofserve-client"
# Each process answers this one itself.
LIVE = f"{PROOFS}/health/live"
# How long a call waits for the next owner, and the pause between two looks, seconds.
NEXT_OWNER_S = 30.0
LOOK_S = 0.1
# Of one connection only (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset(
    name.encode()
    for name in ("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)
# This process writes its own.
_OWN_HEADERS = _HOP_BY_HOP | {b"date", b"server"}


class OwnerLost(ApiError):
    """No process owns the node, or its owner ended before it had answered."""

    status = 503
    headers = {"Retry-After": "1"}  # noqa: RUF012 - as the base class


class ForwardingRoute(BaseRoute):
    """All proof routes, in a process that does not own the node; there it comes before them.

    ``access`` refuses a call without a valid key before its body is read; the owner checks it too.
    """

    path = f"{PROOFS}/{{rest:path}}"

    def __init__(
        self, ownership: Callable[[], Ownership | None], access: Access, max_body_bytes: int
    ) -> None:
        self._ownership = ownership
        self._access = access
        self._max_body_bytes = max_body_bytes

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        ownership = self._ownership()
        if scope["type"] != "http" or ownership is None or ownership.node is not None:
            return Match.NONE, {}
        path = _path(scope)
        ours = path.startswith((f"{PROOFS}/", f"{RECEIPTS}/")) and path != LIVE
        # Not the page's stream: an answer is read to its end. The page then asks for snapshots.
        ours = ours or path == SNAPSHOT
        return (Match.FULL if ours else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except ApiError as error:
            response = error_response(error)
            count_and_log(None, request, response, reason_of(error))
        if has_upgraded_body(request):
            response.headers["Connection"] = "close"
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        ownership = self._ownership()
        if ownership is None:
            raise NotEnabled("PoC not enabled")
        body = b""
        if request.method not in READING:
            self._access.admit(request, role_for({request.method}, _path(request.scope)))
            body = await self._body(request)
        return await while_connected(request, _ask_owner(ownership, request, body))

    async def _body(self, request: Request) -> bytes:
        limit = self._max_body_bytes
        too_large = BodyTooLarge(f"the body has more than {limit} bytes (POC_MAX_BODY_BYTES)")
        try:
            body = await (await with_body(Request, request, limit, too_large)).body()
        except ClientDisconnect:
            raise ClientGone("Client closed request") from None
        require_body(request, body)
        return body

    def url_path_for(self, name: str, /, **path_params: Any) -> URLPath:
        """Always raises NoMatchFound: the route has no name."""
        raise NoMatchFound(name, path_params)


def _path(scope: Scope) -> str:
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


async def _ask_owner(ownership: Ownership, request: Request, body: bytes) -> Response:
    """The owner's answer. Waits for the next owner while there is none. Raises OwnerLost."""
    deadline = time.monotonic() + NEXT_OWNER_S
    while not ownership.is_ending and time.monotonic() < deadline:
        if (owner := ownership.owner) is not None:
            try:
                return await _ask(owner.socket, request, body)
            except httpx.ConnectError:
                # It has ended, and the request did not reach it.
                pass
            except httpx.TransportError as error:
                if request.method not in READING:
                    raise OwnerLost(
                        "the API process that owns the proofs ended before it answered, and may"
                        " have done what was asked: look at /status, then ask again"
                    ) from error
        await asyncio.sleep(LOOK_S)
    raise OwnerLost("no API process owns the proofs at the moment; ask again")


async def _ask(socket: str, request: Request, body: bytes) -> Response:
    """One attempt, on a new connection: a kept one may belong to a process that has ended."""
    scope = request.scope
    dropped = {*_HOP_BY_HOP, CLIENT, b"content-length"}
    headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
    headers.append((CLIENT, peers_of(scope)))
    path = scope["raw_path"].removeprefix(scope.get("root_path", "").encode())
    target = path + b"?" + scope["query_string"] if scope["query_string"] else path
    url = httpx.URL("http://owner", raw_path=target)
    transport = httpx.AsyncHTTPTransport(uds=socket)
    timeout = httpx.Timeout(None, connect=NEXT_OWNER_S)
    # No proxy of the environment: it would get calls that never leave this machine.
    async with httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False) as client:
        asked = client.build_request(request.method, url, headers=headers, content=body)
        answer = await client.send(asked, stream=True)
        content = b"".join([part async for part in answer.aiter_raw()])
        await answer.aclose()
    response = Response(content, answer.status_code)
    kept = [(name.lower(), value) for name, value in answer.headers.raw]
    response.raw_headers = [(name, value) for name, value in kept if name not in _OWN_HEADERS]
    return response


def peers_of(scope: Scope) -> bytes:
    """The value of ``CLIENT`` for a request: its own address and that of the server, or null."""
    return json.dumps([scope.get("client"), scope.get("server")]).encode()


def private_app(routers: Callable[[], list[APIRouter]]) -> ASGIApp:
    app = FastAPI(openapi_url=None)
    for router in routers():
        app.include_router(router)

    async def with_client(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = _as_it_came(scope)
        await app(scope, receive, send)

    return with_client


def _as_it_came(scope: Scope) -> Scope:
    named = [value for name, value in scope["headers"] if name == CLIENT]
    headers = [(name, value) for name, value in scope["headers"] if name != CLIENT]
    # Without the header the caller is no process of ours: it counts as another machine.
    client, server = json.loads(named[0]) if named else (("0.0.0.0", 0), None)  # noqa: S104
    return {**scope, "headers": headers, "client": _pair(client), "server": _pair(server)}


def _pair(value: Any) -> tuple[Any, ...] | None:
    return None if value is None else tuple(value)
