"""The endpoint plugin in an application that never got as far as an engine."""

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette.datastructures import State

from proofserve.engines.vllm.support import UnsupportedEngine
from proofserve.plugin.endpoint import ProofEndpoints, require_right_experts

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/status", "/results", "/generate/x"])
async def test_without_enable_poc_the_routes_say_so(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POC_ENABLED", raising=False)
    app = FastAPI()
    plugin = ProofEndpoints()
    plugin.attach_router(app)
    await plugin.init_state(None, State(), Namespace())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        response = await client.get(f"/api/v1/pow{path}")
    assert response.status_code == 503
    assert response.json() == {"detail": "PoC not enabled"}


def test_measure_is_closed_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def paths() -> set[str]:
        app = FastAPI()
        ProofEndpoints().attach_router(app)
        return set(app.openapi()["paths"])

    assert "/api/v1/pow/measure" not in paths()
    monkeypatch.setenv("POC_MEASURE", "1")
    assert "/api/v1/pow/measure" in paths()


async def test_a_server_without_an_access_rule_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POC_ENABLED", "1")
    monkeypatch.delenv("POC_API_KEY", raising=False)
    with pytest.raises(ValueError, match="--poc-api-key"):
        await ProofEndpoints().init_state(None, State(), Namespace(host=None, uds=None))


async def test_receipts_without_proofs_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POC_ENABLED", raising=False)
    monkeypatch.setenv("POC_RECEIPTS", "1")
    with pytest.raises(ValueError, match="POC_RECEIPTS / --receipts needs"):
        await ProofEndpoints().init_state(None, State(), Namespace())


async def test_the_openapi_page_is_built_at_start() -> None:
    app = FastAPI()
    ProofEndpoints().attach_router(app)
    assert app.openapi_schema is None
    async with app.router.lifespan_context(app):
        assert app.openapi_schema is not None
        assert "/api/v1/pow/status" in app.openapi_schema["paths"]


def test_the_page_declares_authorization_where_there_are_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def declared() -> bool:
        app = FastAPI()
        ProofEndpoints().attach_router(app)
        return "security" in app.openapi()["paths"]["/api/v1/pow/status"]["get"]

    monkeypatch.delenv("POC_API_KEY", raising=False)
    assert not declared()
    monkeypatch.setenv("POC_API_KEY", "a-long-random-key")
    assert declared()


async def test_a_client_that_does_not_leave_does_not_keep_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proofserve.plugin.endpoint.RESPONSES_END_S", 0.2)
    app = FastAPI()
    app.add_api_route("/endless", lambda: StreamingResponse(endless()))
    ProofEndpoints().attach_router(app)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    app.state.server = server
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/endless"
    async with httpx.AsyncClient() as client, client.stream("GET", url):
        server.should_exit = True
        await asyncio.wait_for(serving, 10.0)


async def endless() -> AsyncIterator[bytes]:
    yield b"first"
    await asyncio.Event().wait()


def test_a_node_of_sketch_v2_alone_does_not_start_where_a_kernel_chooses_experts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    why = "sketch-v2 cannot choose this model's experts: a kernel does"
    with pytest.raises(UnsupportedEngine, match=why):
        require_right_experts(why, "sketch-v2")
    require_right_experts(None, "sketch-v2")
    assert caplog.messages == []
    require_right_experts(why, None)
    assert caplog.messages == [why]
