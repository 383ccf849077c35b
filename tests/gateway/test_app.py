"""The application's life: what it starts, what it leaves behind, what it lets pages read."""

import asyncio
import gc
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.types import ASGIApp

from gateway.probe_backend import ProbeBackend, probe_backend
from proofserve.gateway import app as gateway_app
from proofserve.gateway.app import build, running
from proofserve.gateway.gateway import Gateway
from proofserve.gateway.records import BackendSpec, ClientSpec, GatewayPlan

UNREACHABLE = GatewayPlan((BackendSpec("http://127.0.0.1:1"),), probe_interval=60)


@pytest.fixture
async def stub() -> AsyncIterator[ProbeBackend]:
    async with probe_backend() as stub:
        yield stub


@pytest.mark.anyio
async def test_each_backend_was_asked_before_the_first_request(stub: ProbeBackend) -> None:
    async with running(GatewayPlan((BackendSpec(stub.url),), probe_interval=60)) as gateway:
        assert list(gateway.pool.backends[0].models or {}) == ["tiny"]
        assert gateway.pool.knows("tiny")
        assert not gateway.pool.knows("large")


@pytest.mark.anyio
async def test_backends_are_asked_on_with_the_key(stub: ProbeBackend) -> None:
    plan = GatewayPlan((BackendSpec(stub.url),), probe_interval=0.01, backend_key="secret")
    async with running(plan) as gateway:
        assert gateway.backend_lines == b"authorization: Bearer secret\r\n"
        async with asyncio.timeout(10):
            while len(stub.requests) < 10:
                stub.news.clear()
                await stub.news.wait()
    assert all("Bearer secret" in head for head in stub.requests)


@pytest.mark.anyio
async def test_nothing_goes_on_after_the_end(stub: ProbeBackend) -> None:
    before = asyncio.all_tasks()
    async with running(GatewayPlan((BackendSpec(stub.url),), probe_interval=0.01)) as gateway:
        async with asyncio.timeout(5):
            await gateway.deadlines.idle.wait()
    served = {task for task in asyncio.all_tasks() - before if "serve" not in repr(task)}
    assert served == set()
    assert gateway.deadlines._timer is not None
    assert gateway.deadlines._timer.cancelled()


@pytest.mark.anyio
async def test_the_collector_passes_over_what_lives_until_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_app, "gc", gc)
    async with running(UNREACHABLE):
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() < 10_000


@pytest.mark.anyio
async def test_where_the_gateway_has_keys_the_clients_stay_here() -> None:
    assert b"authorization" not in Gateway(UNREACHABLE).held_back
    assert Gateway(UNREACHABLE).backend_lines == b""
    keyed = replace(UNREACHABLE, clients=(ClientSpec(name="anna", key="key"),))
    assert b"authorization" in Gateway(keyed).held_back


@pytest.mark.anyio
async def test_signals_are_the_gateways_while_it_lives() -> None:
    app = build(UNREACHABLE)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    async with app.router.lifespan_context(app):
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    for number, handler in before.items():
        signal.signal(number, handler)


def test_another_thread_leaves_the_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with TestClient(build(UNREACHABLE)) as client:
        assert signal.getsignal(signal.SIGTERM) is before
        assert client.get("/v1/health").json() == {"status": "ok"}


def test_an_engine_in_this_process_answers_everything_else() -> None:
    engine_app = FastAPI()
    ended: list[bool] = []

    @engine_app.get("/api/v1/pow/status")
    def status() -> str:
        return "the engine's"

    @engine_app.get("/v1/health")
    def hidden() -> str:
        return "never seen"

    @asynccontextmanager
    async def engine() -> AsyncIterator[tuple[BackendSpec, ASGIApp]]:
        yield BackendSpec("http://127.0.0.1:1"), engine_app
        ended.append(True)

    with TestClient(
        build(replace(UNREACHABLE, backends=()), engine), client=("127.0.0.1", 5)
    ) as http:
        assert http.get("/api/v1/pow/status").json() == "the engine's"
        assert http.get("/v1/health").json() == {"status": "ok"}
        shown = http.get("/admin/backends").json()
        assert [each["backend"] for each in shown] == ["http://127.0.0.1:1"]
        assert not ended
    assert ended


PAGE = {"origin": "https://page"}


def test_pages_may_read_answers_where_they_are_listed() -> None:
    with TestClient(build(replace(UNREACHABLE, cors_origins=("https://page",)))) as client:
        answer = client.get("/v1/health", headers=PAGE)
        assert answer.headers["access-control-allow-origin"] == "https://page"
        asks = {"access-control-request-method": "POST"}
        wants = {**PAGE, **asks, "access-control-request-headers": "authorization"}
        before = client.options("/v1/chat/completions", headers=wants)
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == "https://page"
        other = client.get("/v1/health", headers={"origin": "https://other"})
        assert "access-control-allow-origin" not in other.headers


def test_pages_may_not_read_answers_by_default() -> None:
    with TestClient(build(UNREACHABLE)) as client:
        answer = client.get("/v1/health", headers=PAGE)
        assert "access-control-allow-origin" not in answer.headers
