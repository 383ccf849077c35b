"""The endpoint plugin in an application that never got as far as an engine."""

from argparse import Namespace

import httpx
import pytest
from fastapi import FastAPI
from starlette.datastructures import State

from proofserve.plugin.endpoint import ProofEndpoints
from proofserve.wiring.access import AccessUndefined

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


async def test_a_server_that_strangers_could_call_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POC_ENABLED", "1")
    monkeypatch.delenv("POC_API_KEY", raising=False)
    with pytest.raises(AccessUndefined, match="--poc-api-key"):
        await ProofEndpoints().init_state(None, State(), Namespace(host=None, uds=None))
