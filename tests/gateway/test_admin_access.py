"""What is for operators only, behind an application that answers everybody."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from proofserve.gateway.admin.admin_access import AdminOnly
from proofserve.gateway.records import BackendSpec, GatewayPlan

BACKEND = BackendSpec("http://127.0.0.1:1")


def asked(plan: GatewayPlan, host: str, key: str | None = None, path: str = "/tokenize") -> int:
    app = FastAPI()
    app.add_api_route("/tokenize", lambda: {"tokens": [1]})
    app.add_api_route("/api/own/status", lambda: {"asks": "for a key of its own"})
    client = TestClient(AdminOnly(app, plan), client=(host, 50_000))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = client.get(path, headers=headers)
    if response.status_code != 200:
        assert response.json()["error"]["code"] == "admin_only"
    return response.status_code


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1"])
def test_without_an_admin_key_this_machine_may(host: str) -> None:
    assert asked(GatewayPlan((BACKEND,)), host) == 200


@pytest.mark.parametrize("host", ["10.0.0.1", "2001:db8::1", "testclient"])
def test_without_an_admin_key_other_machines_may_not(host: str) -> None:
    assert asked(GatewayPlan((BACKEND,)), host) == 403


def test_with_an_admin_key_it_alone_counts() -> None:
    plan = GatewayPlan((BACKEND,), admin_key="secret")
    assert asked(plan, "10.0.0.1", "secret") == 200
    assert asked(plan, "10.0.0.1", "secre") == 403
    assert asked(plan, "127.0.0.1") == 403


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
def test_what_asks_for_a_key_of_its_own_is_left_to_it(path: str, status: int) -> None:
    plan = GatewayPlan((BACKEND,), admin_key="secret", self_guarded=("/api/own/",))
    assert asked(plan, "10.0.0.1", "another-key", path) == status
    assert asked(GatewayPlan((BACKEND,), admin_key="secret"), "10.0.0.1", "other", path) == 403
