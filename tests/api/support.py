"""A small server: our router in an application with its own error handlers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from proofserve.api.node import Deployment, Node
from proofserve.api.routes import router
from proofserve.rounds.manager import RoundManager
from proofserve.rounds.records import Limits
from rounds.doubles import QUICK, MemoryOutbox
from support.fake_engine import FakeEngine

ORDER: dict[str, Any] = {
    "block_hash": "block",
    "block_height": 7,
    "public_key": "key",
    "node_id": 1,
    "node_count": 3,
    "params": {"model": "toy", "seq_len": 16, "k_dim": 12},
}
JOB: dict[str, Any] = {**ORDER, "nonces": [1, 2, 3, 4]}
START, GENERATE, STOP, STATUS = "/init/generate", "/generate", "/stop", "/status"
NODES_OWN = {"access", "call_limits", "liveness", "receipts"}
# Sent as text: Python's JSON module accepts these, the JSON standard does not.
RAW = {"content-type": "application/json"}


def changed(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    if rest:
        return {**body, head: changed(body.get(head) or {}, rest, value)}
    return {**body, head: value}


def said(response: httpx.Response) -> str:
    """The location and message of every reported fault."""
    details = response.json()["detail"]
    assert all(set(detail) == {"type", "loc", "msg"} for detail in details)
    return " ".join(f"{'.'.join(map(str, d['loc']))}: {d['msg']}" for d in details)


async def _foreign(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"whose": "the application's"}, 418)


def application(get_node: Callable[[Request], Node]) -> FastAPI:
    made = FastAPI()
    made.include_router(router(get_node))
    for error in (RequestValidationError, HTTPException, Exception):
        made.exception_handler(error)(_foreign)
    return made


@cache
def shared_application() -> FastAPI:
    """For any node: making an application takes a tenth of a second, as a hundred requests do."""
    return application(lambda request: request.scope["node"])  # type: ignore[no-any-return]


class Server:
    """The application with its test doubles, and a client for it."""

    def __init__(self, limits: Limits = QUICK, **deployed: Any) -> None:
        """``deployed`` are values of the deployment, or of the node itself."""
        own = {name: deployed.pop(name) for name in NODES_OWN & deployed.keys()}
        self.engine = FakeEngine()
        self.engine.latency_s = 0.001
        self.outbox = MemoryOutbox()
        deployment = Deployment(
            engine_info=self.engine.engine_info, enabled=True, scheme="artifact-v1", max_nonces=50
        )
        manager = RoundManager(self.engine, self.outbox, limits)
        self.node = Node(replace(deployment, **deployed), manager, self.outbox, **own)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self), base_url="http://node/api/v1/pow"
        )

    @cached_property
    def app(self) -> FastAPI:
        """An application of this server's own, which the test may change, from now on."""
        return application(lambda _: self.node)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app if "app" in vars(self) else shared_application()
        await app({**scope, "node": self.node}, receive, send)

    async def post(self, path: str, body: Any = None) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def get(self, path: str) -> httpx.Response:
        return await self.client.get(path)

    async def status(self) -> dict[str, Any]:
        response = await self.get(STATUS)
        assert response.status_code == 200
        body: dict[str, Any] = response.json()
        return body

    async def ended(self, request_id: str) -> dict[str, Any]:
        async with asyncio.timeout(5):
            while True:
                body: dict[str, Any] = (await self.get(f"/generate/{request_id}")).json()
                if body["status"] not in ("queued", "running"):
                    return body
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(limits: Limits = QUICK, **deployed: Any) -> AsyncIterator[Server]:
    server = Server(limits, **deployed)
    async with server.client:
        yield server
    await server.node.manager.aclose()
    assert server.engine.leases == 0
