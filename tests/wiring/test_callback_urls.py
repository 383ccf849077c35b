"""A callback URL is checked when a round or job is ordered: a real node, names as they resolve."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from proofserve.api.node import Node
from proofserve.api.routes import router
from proofserve.settings.node import NodeSettings
from proofserve.wiring.node import running_node
from support.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

ORDER: dict[str, Any] = {
    "block_hash": "block",
    "block_height": 7,
    "public_key": "key",
    "node_id": 1,
    "node_count": 3,
    "params": {"model": "toy", "seq_len": 16, "k_dim": 12},
}
JOB = {**ORDER, "nonces": [1, 2, 3]}
DISTANCE = {
    **{name: value for name, value in ORDER.items() if name != "params"},
    "r_target": 1.4,
    "seq_len": 16,
}
ORDERS = [
    ("/init/generate", ORDER, "url"),
    ("/generate", JOB, "url"),
    ("/init", DISTANCE, "callback_url"),
    ("/init/validate", DISTANCE, "callback_url"),
    ("/init/generate", DISTANCE, "callback_url"),
]
# RFC 6761: no resolver knows a name below it.
UNKNOWN = "http://receiver.invalid:9000"


async def serving(folder: Path, *allow: str) -> AsyncIterator[tuple[Node, httpx.AsyncClient]]:
    chosen = NodeSettings(enabled=True, outbox=folder / "outbox.sqlite", callback_allow=allow)
    app = FastAPI()
    async with running_node(FakeEngine(), chosen) as node:
        app.include_router(router(lambda _: node))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://n/api/v1/pow") as client:
            yield node, client


@pytest.fixture
async def default(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A node that may call back to this machine only."""
    async for _, client in serving(tmp_path, "loopback"):
        yield client


@pytest.fixture
async def elsewhere(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A node that may call back to another network only."""
    async for _, client in serving(tmp_path, "10.0.0.0/8"):
        yield client


@pytest.mark.parametrize(("path", "body", "field"), ORDERS)
async def test_a_name_that_leads_only_to_forbidden_addresses_is_422(
    elsewhere: httpx.AsyncClient, path: str, body: dict[str, Any], field: str
) -> None:
    response = await elsewhere.post(path, json={**body, field: "http://localhost:9000"})
    assert response.status_code == 422
    (problem,) = response.json()["detail"]
    assert problem["loc"] == ["body", field]
    assert "leads to localhost at " in problem["msg"]
    assert "--poc-callback-allow" in problem["msg"]
    assert (await elsewhere.get("/status")).json()["status"] == "IDLE"


@pytest.mark.parametrize(("path", "body", "field"), ORDERS)
async def test_a_name_that_leads_to_allowed_addresses_gets_no_warning(
    default: httpx.AsyncClient, path: str, body: dict[str, Any], field: str
) -> None:
    response = await default.post(path, json={**body, field: "http://localhost:9"})
    assert response.status_code == 200
    assert "warning" not in response.json()
    assert (await default.get("/status")).json()["warning"] is None


@pytest.mark.parametrize(("path", "body", "field"), ORDERS)
async def test_a_name_that_cannot_be_resolved_is_accepted_with_a_warning(
    default: httpx.AsyncClient, path: str, body: dict[str, Any], field: str
) -> None:
    response = await default.post(path, json={**body, field: UNKNOWN})
    assert response.status_code == 200
    warning = response.json()["warning"]
    assert warning.startswith(f"{field}: receiver.invalid could not be resolved")
    status = (await default.get("/status")).json()
    assert status["warning"] == (None if path == "/generate" else warning)


async def test_the_warning_belongs_to_its_round(default: httpx.AsyncClient) -> None:
    await default.post("/init/generate", json={**ORDER, "url": UNKNOWN})
    await default.post("/stop")
    assert (await default.get("/status")).json()["warning"]
    await default.post("/init/generate", json=ORDER)
    assert (await default.get("/status")).json()["warning"] is None
