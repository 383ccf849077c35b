"""The gateway protects operators' paths of an application that answers every client."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from proofserve.gateway.admin import admin_only
from proofserve.gateway.records import BackendSpec, GatewayPlan

BACKEND = BackendSpec("http://127.0.0.1:1")


def status_of(plan: GatewayPlan, host: str, key: str | None = None, path: str = "/tokenize") -> int:
    app = FastAPI()
    app.add_api_route("/tokenize", lambda: {"tokens": [1]})
    app.add_api_route("/api/own/status", lambda: {"asks": "for a key of its own"})
    client = TestClient(admin_only(app, plan), client=(host, 50_000))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = client.get(path, headers=headers)
    if response.status_code != 200:
        assert response.json()["error"]["code"] == "admin_only"
    return response.status_code


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1"])
def test_without_an_admin_key_the_gateway_accepts_this_machine(host: str) -> None:
    assert status_of(GatewayPlan((BACKEND,)), host) == 200


@pytest.mark.parametrize("host", ["10.0.0.1", "2001:db8::1", "testclient"])
def test_without_an_admin_key_the_gateway_refuses_other_machines(host: str) -> None:
    assert status_of(GatewayPlan((BACKEND,)), host) == 403


def test_with_an_admin_key_the_gateway_accepts_only_that_key() -> None:
    plan = GatewayPlan((BACKEND,), admin_key="secret")
    assert status_of(plan, "10.0.0.1", "secret") == 200
    assert status_of(plan, "10.0.0.1", "secre") == 403
    assert status_of(plan, "127.0.0.1") == 403


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/own/status", 200),
        ("/api%2fown/status", 200),
        ("/api/own/../../tokenize", 403),
        ("//api/own/status", 403),
        ("/tokenize?/api/own/", 403),
    ],
)
def test_the_gateway_leaves_paths_with_their_own_key_to_the_application(
    path: str, status: int
) -> None:
    plan = GatewayPlan((BACKEND,), admin_key="secret", self_guarded=("/api/own/",))
    assert status_of(plan, "10.0.0.1", "another-key", path) == status
    assert status_of(GatewayPlan((BACKEND,), admin_key="secret"), "10.0.0.1", "other", path) == 403
