"""The prober: a backend's health and its models."""

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path

import pytest

from gateway.probe_backend import ProbeBackend, listing, probe_backend
from proofserve.gateway import backends as module
from proofserve.gateway.backends import Backend, Prober
from proofserve.gateway.connections import ConnectionPool, WriteBatch
from proofserve.gateway.records import BackendSpec

pytestmark = pytest.mark.anyio


def backend_at(url: str) -> Backend:
    loop = asyncio.get_running_loop()
    return Backend(BackendSpec(url), ConnectionPool(url, 1.0, loop, WriteBatch(loop)), loop.time)


@pytest.fixture
async def stub() -> AsyncIterator[ProbeBackend]:
    async with probe_backend() as stub:
        yield stub


@pytest.fixture
async def backend(stub: ProbeBackend) -> Backend:
    return backend_at(stub.url)


@pytest.fixture
async def prober(backend: Backend) -> AsyncIterator[Prober]:
    prober = Prober(backend, 0.01, None)
    yield prober
    await prober.close()


async def test_the_prober_learns_the_models(
    stub: ProbeBackend, backend: Backend, prober: Prober
) -> None:
    assert backend.models is None
    stub.models = listing("tiny", "tiny-lora", max_model_len=64)
    await prober.ask()
    assert backend.models is not None
    assert list(backend.models) == ["tiny", "tiny-lora"]
    assert backend.models["tiny"]["max_model_len"] == 64
    assert backend.healthy
    stub.models = listing("large")
    await prober.ask()
    assert list(backend.models) == ["large"]


async def test_a_backend_is_unhealthy_after_two_failures_and_healthy_after_one_answer(
    stub: ProbeBackend, backend: Backend, prober: Prober
) -> None:
    await prober.ask()
    stub.health = HTTPStatus.SERVICE_UNAVAILABLE
    await prober.ask()
    assert backend.healthy
    await prober.ask()
    assert not backend.healthy
    assert backend.models == {"tiny": {"id": "tiny", "object": "model"}}
    await prober.ask()
    stub.health = HTTPStatus.OK
    await prober.ask()
    assert backend.healthy


async def test_failures_that_are_not_in_a_row_do_not_make_a_backend_unhealthy(
    stub: ProbeBackend, backend: Backend, prober: Prober
) -> None:
    for status in [HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.OK] * 3:
        stub.health = status
        await prober.ask()
        assert backend.healthy


async def test_each_change_of_health_is_logged_once(
    stub: ProbeBackend, prober: Prober, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", module.__name__)
    stub.health = HTTPStatus.INTERNAL_SERVER_ERROR
    for _ in range(4):
        await prober.ask()
    stub.health = HTTPStatus.OK
    for _ in range(2):
        await prober.ask()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "backend http",
        "backend http",
    ]
    assert f"{stub.url} is unhealthy: HTTPStatusError" in caplog.messages[0]
    assert f"{stub.url} is healthy again" in caplog.messages[1]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"\xff\xfe\x00",
        b"null",
        b"7",
        b"[]",
        b"{}",
        b'{"data":null}',
        b'{"data":{"id":"tiny"}}',
        b'{"data":["tiny"]}',
        b'{"data":[{}]}',
        b'{"data":[{"id":[]}]}',
        b"[" * 100_000,
    ],
)
async def test_invalid_models_change_nothing_and_are_logged_once(
    body: bytes,
    stub: ProbeBackend,
    backend: Backend,
    prober: Prober,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await prober.ask()
    stub.models = body
    for _ in range(3):
        await prober.ask()
    assert backend.healthy
    assert list(backend.models or {}) == ["tiny"]
    assert [f"{stub.url} does not list its models" in text for text in caplog.messages] == [True]
    stub.models = listing("large")
    await prober.ask()
    assert list(backend.models or {}) == ["large"]


@pytest.mark.parametrize("status", [HTTPStatus.NOT_FOUND, HTTPStatus.IM_A_TEAPOT])
async def test_a_backend_without_a_models_page_may_serve_any_model(
    status: HTTPStatus, stub: ProbeBackend, backend: Backend, prober: Prober
) -> None:
    stub.models_status = status
    await prober.ask()
    await prober.ask()
    assert backend.healthy
    assert backend.models is None


@pytest.mark.parametrize("status", [HTTPStatus.NOT_FOUND, HTTPStatus.IM_A_TEAPOT])
async def test_a_backend_without_a_health_page_is_unhealthy(
    status: HTTPStatus, stub: ProbeBackend, backend: Backend, prober: Prober
) -> None:
    stub.health = status
    await prober.ask()
    await prober.ask()
    assert not backend.healthy
    assert backend.models is None


async def test_a_refused_connection_counts_as_a_failed_probe() -> None:
    async with probe_backend() as gone:
        backend = backend_at(gone.url)
    prober = Prober(backend, 1, None)
    await prober.ask()
    assert backend.healthy
    await prober.ask()
    assert not backend.healthy
    await prober.close()


async def test_the_prober_sends_the_backends_key(
    stub: ProbeBackend, backend: Backend, prober: Prober
) -> None:
    await prober.ask()
    with_key = Prober(backend, 1, "secret")
    await with_key.ask()
    await with_key.close()
    keys = ["authorization: bearer secret" in head.lower() for head in stub.requests]
    assert keys == [False, False, True, True]


async def test_the_prober_reaches_a_unix_socket(tmp_path: Path) -> None:
    async with probe_backend(tmp_path / "s") as stub:
        backend = backend_at(stub.url)
        prober = Prober(backend, 1, None)
        await prober.ask()
        await prober.close()
        assert list(backend.models or {}) == ["tiny"]


async def test_the_prober_repeats_until_it_is_cancelled(
    stub: ProbeBackend, backend: Backend, prober: Prober, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[float] = []
    monkeypatch.setattr(backend.pool, "drop_idle", swept.append)
    task = asyncio.create_task(prober.run())
    async with asyncio.timeout(10):
        while len(stub.requests) < 6:
            stub.news.clear()
            await stub.news.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(swept) >= 2
    asked_for = [head.split()[1] for head in stub.requests]
    assert asked_for[:4] == ["/health", "/v1/models"] * 2
