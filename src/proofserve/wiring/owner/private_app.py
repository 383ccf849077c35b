"""What the owner serves to the other API processes of its server, on a private unix socket.

It has the proof routes alone. A request keeps its headers, and the address of its client comes in
a header of ours, so that the owner checks keys and addresses as if the client had come to it.
"""

import json
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

# The address of the client, in JSON. The process that passes a request on removes the client's own.
CLIENT = b"x-proofserve-client"


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
