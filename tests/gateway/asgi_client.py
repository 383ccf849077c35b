"""Requests to the gateway's application without a server or a socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from proofserve.gateway.app import build
from proofserve.gateway.gateway import Gateway
from proofserve.gateway.records import BackendSpec, GatewayPlan

LOCAL = "127.0.0.1"


class AsgiClient:
    """A client of the application ``app``, whose state holds ``gateway``."""

    def __init__(self, gateway: Gateway, app: Any) -> None:
        self.gateway = gateway
        self._app = app

    async def ask(self, method: str, path: str, client: str = LOCAL, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self._with_state, client=(client, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            return await http.request(method, path, **more)

    async def _with_state(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app({**scope, "state": {"gateway": self.gateway}}, receive, send)

    async def get(self, path: str, **more: Any) -> httpx.Response:
        return await self.ask("GET", path, **more)


@asynccontextmanager
async def started_client(plan: GatewayPlan) -> AsyncIterator[AsgiClient]:
    """A client of an application that has started: it has probed its backends."""
    app = build(plan)
    async with app.router.lifespan_context(app) as state:
        yield AsgiClient(state["gateway"], app)


def client_of(plan: GatewayPlan) -> AsgiClient:
    """A client of an application that has not started, so it has probed no backend: quicker."""
    return AsgiClient(Gateway(plan), build(plan))


PLAN = GatewayPlan((BackendSpec("http://a"), BackendSpec("http://b", 2)), probe_interval=60)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = body["error"]
    return found
