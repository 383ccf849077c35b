"""What is for operators only, behind an application that answers everybody."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from proofserve.gateway.operators import OperatorsOnly
from proofserve.gateway.records import BackendSpec, GatewayPlan

BACKEND = BackendSpec("http://127.0.0.1:1")


def asked(plan: GatewayPlan, host: str, key: str | None = None) -> int:
    app = FastAPI()
    app.add_api_route("/tokenize", lambda: {"tokens": [1]})
    client = TestClient(OperatorsOnly(app, plan), client=(host, 50_000))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = client.get("/tokenize", headers=headers)
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
