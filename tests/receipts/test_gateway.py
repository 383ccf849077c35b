"""Receipts through a gateway: real gateways and nodes over HTTP, chat by a fake engine."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gateway.serving import Server, plan_for, serving
from proofserve.gateway.records import ClientSpec
from proofserve.wire import RECEIPTS
from proofserve.wire.signed import signed_receipt
from support.pace import until

from .nodes import Served, served
from .support import an_answer, check_receipt, logged

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_collections")]

WEB, APP = {"Authorization": "Bearer web-key"}, {"Authorization": "Bearer app-key"}
CLIENTS = (ClientSpec(name="web", key="web-key"), ClientSpec(name="app", key="app-key"))
ORDER = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


def chatting(app: FastAPI, node: Served) -> None:
    """Routes like vLLM's: the id of an answer is made of the request's id."""

    @app.get("/health")
    def health() -> Response:
        return Response()

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "toy"}]}

    @app.post("/v1/{path:path}")
    async def chat(request: Request, path: str) -> Response:
        body = await request.json()
        prefix = "chatcmpl" if path == "chat/completions" else "cmpl"
        response_id = f"{prefix}-{request.headers['x-request-id']}"
        if body.get("fails"):
            return JSONResponse({"error": {}}, 400)
        answer = {"id": response_id, "choices": []}

        def end() -> None:
            for choice in range(body.get("n", 1)):
                node.engine.answers.put_nowait(an_answer(response_id, choice))

        if not body.get("stream"):
            end()
            return JSONResponse(answer)

        async def events() -> AsyncIterator[str]:
            yield f"data: {json.dumps(answer)}\n\n"
            end()
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


@asynccontextmanager
async def deployment(
    folder: Path, nodes: int = 1, **plan: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, list[Served], Server]]:
    """A gateway with two clients' keys in front of nodes, and a client of it."""
    async with AsyncExitStack() as stack:
        backends = []
        for n in range(nodes):
            place = folder / str(n)
            place.mkdir()
            backends.append(await stack.enter_async_context(served(place, more=chatting)))
        chosen = {"clients": CLIENTS, "receipts_path": RECEIPTS} | plan
        server = await stack.enter_async_context(
            serving(plan_for(*(each.url for each in backends), **chosen))
        )
        url = f"http://127.0.0.1:{server.port}"
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        yield client, backends, server


async def say(client: httpx.AsyncClient, **more: Any) -> str:
    """The id of an answer to a client."""
    response = await client.post("/v1/chat/completions", json=ORDER | more, headers=WEB)
    assert response.status_code == 200
    text = response.text.removeprefix("data: ").partition("\n\n")[0]
    found: str = json.loads(text)["id"]
    return found


async def all_logged(backends: list[Served], count: int) -> None:
    for each in backends:
        assert each.node.receipts is not None
        stored = (await each.node.receipts.gauges()).stored
        await logged(each.node.receipts, max(stored, count))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_finds_its_receipt_behind_the_gateway(tmp_path: Path, stream: bool) -> None:
    async with deployment(tmp_path) as (client, backends, _):
        response_id = await say(client, stream=stream, n=2)
        await all_logged(backends, 2)
        response = await client.get(f"/v1/receipts/{response_id}", headers=WEB)
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        for choice, body in enumerate(response.json()["receipts"]):
            signed = signed_receipt(body)
            check_receipt(signed)
            assert (signed.receipt.response_id, signed.receipt.choice) == (response_id, choice)


async def test_no_other_key_finds_it(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (client, backends, _):
        response_id = await say(client)
        await all_logged(backends, 1)
        refused = await client.get(f"/v1/receipts/{response_id}", headers=APP)
        unknown = await client.get("/v1/receipts/chatcmpl-none", headers=WEB)
        assert refused.status_code == unknown.status_code == 404
        # A client cannot tell another's answer from none.
        assert refused.json() == unknown.json()
        assert refused.json()["error"]["code"] == "unknown_receipt"
        long = await client.get(f"/v1/receipts/{'x' * 600}", headers=WEB)
        assert (long.status_code, long.json()["error"]["code"]) == (422, "invalid_body")
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            response = await client.get(f"/v1/receipts/{response_id}", headers=headers)
            assert response.status_code == 401
        # Nor by sending the id of another client's request once more.
        request_id = response_id.removeprefix("chatcmpl-")
        again = {**APP, "X-Request-Id": request_id}
        assert (
            await client.post("/v1/chat/completions", json=ORDER, headers=again)
        ).status_code == 200
        assert (await client.get(f"/v1/receipts/{response_id}", headers=APP)).status_code == 404
        assert (await client.get(f"/v1/receipts/{response_id}", headers=WEB)).status_code == 200


@pytest.mark.parametrize("request_id", ["mine-1", "a/b+c=:.d"])
async def test_a_request_id_of_the_client_is_in_the_id_of_its_receipt(
    tmp_path: Path, request_id: str
) -> None:
    async with deployment(tmp_path) as (client, backends, _):
        headers = {**WEB, "X-Request-Id": request_id}
        body = {"model": "toy", "prompt": "hi"}
        response = await client.post("/v1/completions", json=body, headers=headers)
        assert response.json()["id"] == f"cmpl-{request_id}"
        assert response.headers["x-request-id"] == request_id
        await all_logged(backends, 1)
        found = await client.get(f"/v1/receipts/cmpl-{request_id}", headers=WEB)
        assert found.json()["receipts"][0]["receipt"]["response_id"] == f"cmpl-{request_id}"


async def test_the_backend_that_answered_is_asked(tmp_path: Path) -> None:
    async with deployment(tmp_path, nodes=2) as (client, backends, _):
        ids = [await say(client) for _ in range(6)]
        counts = []
        for each in backends:
            assert each.node.receipts is not None
            await until(lambda node=each: node.engine.answers.empty())  # type: ignore[misc]
        while sum(counts) < 6:
            counts = [(await b.node.receipts.gauges()).stored for b in backends]  # type: ignore[union-attr]
        assert min(counts) > 0
        await all_logged(backends, 0)
        keys = set()
        for each in ids:
            response = await client.get(f"/v1/receipts/{each}", headers=WEB)
            assert response.status_code == 200
            keys.add(response.json()["receipts"][0]["public_key"])
        assert keys == {b.node.receipts.public_key.hex() for b in backends}  # type: ignore[union-attr]


async def test_statuses_of_the_node_are_passed_on(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (client, backends, _):
        (node,) = backends
        service = node.node.receipts
        assert service is not None
        service.wait_s = 60.0
        async with service._logging:
            response_id = await say(client)
            early = await client.get(f"/v1/receipts/{response_id}", headers=WEB)
            assert (early.status_code, early.headers["retry-after"]) == (425, "1")
        await logged(service, 1)
        await node.node.outbox.receipts.prune(0.0, 3600.0)  # type: ignore[attr-defined]
        late = await client.get(f"/v1/receipts/{response_id}", headers=WEB)
        assert late.status_code == 410
        assert "time to live" in late.json()["detail"]


async def test_a_refused_request_has_no_receipt_to_ask_for(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (client, _, server):
        response = await client.post(
            "/v1/chat/completions", json=ORDER | {"fails": True}, headers=WEB
        )
        assert response.status_code == 400
        assert len(server.gateway.answered) == 0


async def test_a_backend_that_is_gone_is_502(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        place = tmp_path / "0"
        place.mkdir()
        node = await stack.enter_async_context(served(place, more=chatting))
        plan = plan_for(node.url, clients=CLIENTS, receipts_path=RECEIPTS)
        async with serving(plan) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                response_id = await say(client)
                await stack.aclose()
                response = await client.get(f"/v1/receipts/{response_id}", headers=WEB)
                assert response.status_code == 502
                assert response.json()["error"]["code"] == "backend_unreachable"


async def test_without_keys_every_client_has_the_receipts_whose_ids_it_knows(
    tmp_path: Path,
) -> None:
    async with deployment(tmp_path, clients=()) as (client, backends, _):
        response_id = await say(client)
        await all_logged(backends, 1)
        assert (await client.get(f"/v1/receipts/{response_id}")).status_code == 200
        assert (await client.get("/v1/receipts/chatcmpl-other")).status_code == 404
