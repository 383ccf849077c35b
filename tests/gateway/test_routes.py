"""The gateway's own endpoints, through the application."""

from collections.abc import AsyncIterator
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.asgi_client import LOCAL, PLAN, AsgiClient, client_of, error_of, started_client
from gateway.probe_backend import ProbeBackend, listing, probe_backend
from proofserve.gateway.records import BackendSpec, ClientSpec
from support.pace import until

pytestmark = pytest.mark.anyio
ELSEWHERE = "192.0.2.7"
JSON = {"content-type": "application/json"}


@pytest.fixture
async def client() -> AsgiClient:
    return client_of(PLAN)


@pytest.mark.parametrize("path", ["/v1/health", "/health"])
async def test_health_is_ok_until_a_shutdown_begins(path: str, client: AsgiClient) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    client.gateway.draining = True
    answer = await client.get(path)
    assert (answer.status_code, answer.json()) == (503, {"status": "draining"})


async def test_the_gateway_is_ready_if_a_backend_is_available(client: AsgiClient) -> None:
    first, second = client.gateway.pool.backends
    answer = await client.get("/health/ready")
    assert answer.json() == {"status": "ok", "backends": [first.name, second.name]}
    first.healthy = False
    assert (await client.get("/health/ready")).json()["backends"] == [second.name]
    second.draining = True
    answer = await client.get("/health/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "no backend")
    assert (await client.get("/health")).status_code == 200
    first.healthy = True
    client.gateway.draining = True
    answer = await client.get("/health/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "draining")


async def test_models_of_all_backends_are_merged() -> None:
    async with probe_backend() as one, probe_backend() as two, probe_backend() as gone:
        one.models = listing("tiny", "shared", owned_by="first")
        two.models = listing("shared", "large", owned_by="second")
        gone.health = HTTPStatus.NOT_FOUND
        specs = tuple(BackendSpec(each.url) for each in (one, two, gone))
        plan = replace(PLAN, backends=specs, probe_interval=0.02)
        async with started_client(plan) as client:
            await merged(client, one)


async def merged(client: AsgiClient, one: ProbeBackend) -> None:
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    owners = {each["id"]: each["owned_by"] for each in body["data"]}
    assert owners == {"tiny": "first", "shared": "first", "large": "second"}
    assert len(body["data"]) == 3
    first, second, _ = client.gateway.pool.backends
    one.health = HTTPStatus.NOT_FOUND
    await until(lambda: not first.healthy)
    left = (await client.get("/v1/models")).json()["data"]
    assert {each["id"] for each in left} == {"shared", "large"}
    second.draining = True
    assert (await client.get("/v1/models")).json()["data"] == []


async def test_backends_without_a_probe_have_no_models(client: AsgiClient) -> None:
    assert (await client.get("/v1/models")).json()["data"] == []
    assert (await client.get("/admin/backends")).json()[0]["models"] is None


async def test_the_gateway_lists_models_only_for_a_valid_key() -> None:
    client = client_of(replace(PLAN, clients=(ClientSpec(name="anna", key="schlüssel"),)))
    for wrong in ({}, {"authorization": "Bearer other"}):
        answer = await client.get("/v1/models", headers=wrong)
        assert answer.status_code == 401
        assert error_of(answer)["code"] == "invalid_api_key"
    right = {"authorization": "Bearer schlüssel".encode()}
    assert (await client.get("/v1/models", headers=right)).status_code == 200


async def test_the_backends_page_shows_the_state_of_every_backend(client: AsgiClient) -> None:
    first, second = client.gateway.pool.backends
    first.models = {"tiny": {}}
    first.chosen()
    shown = (await client.get("/admin/backends")).json()
    assert shown[0] == {
        "backend": first.name,
        "weight": 1,
        "healthy": True,
        "resting": False,
        "draining": False,
        "in_flight": 1,
        "connections": 0,
        "models": ["tiny"],
    }
    assert (shown[1]["backend"], shown[1]["weight"]) == (second.name, 2)


async def test_an_operator_drains_and_undrains_a_backend(client: AsgiClient) -> None:
    first, second = client.gateway.pool.backends
    which = {"backend": first.name}
    answer = await client.ask("POST", "/admin/drain", json=which)
    assert (answer.status_code, answer.json()["draining"]) == (200, True)
    assert {client.gateway.pool.choose(None, b"", ()) for _ in range(4)} == {second}
    answer = await client.ask("POST", "/admin/undrain", json=which)
    assert answer.json()["draining"] is False
    assert {client.gateway.pool.choose(None, b"", ()) for _ in range(4)} == {first, second}


async def test_an_unknown_backend_is_refused_with_a_list_of_the_known_ones(
    client: AsgiClient,
) -> None:
    answer = await client.ask("POST", "/admin/drain", json={"backend": "http://unknown"})
    assert answer.status_code == 404
    error = error_of(answer)
    assert (error["code"], error["param"]) == ("unknown_backend", "backend")
    for backend in client.gateway.pool.backends:
        assert backend.name in error["message"]
    answer = await client.ask("POST", "/admin/drain", json={"backend": "b" * 60_000})
    assert answer.status_code == 404
    assert len(answer.content) < 1000


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"json": {}}, "body.backend"),
        ({"json": {"backend": 7}}, "body.backend"),
        ({"content": b"{", "headers": JSON}, "body"),
        ({"json": {"backend": "http://a", "more": 1}}, "body.more"),
        ({}, "body"),
    ],
)
async def test_the_error_of_an_invalid_body_names_the_field(
    sent: dict[str, Any], field: str, client: AsgiClient
) -> None:
    answer = await client.ask("POST", "/admin/drain", **sent)
    assert answer.status_code == 422
    error = error_of(answer)
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert error["message"].startswith(field)


@pytest.mark.parametrize(
    "body",
    [
        '{"backend": "http://a"}'.encode("utf-16"),
        b'\xef\xbb\xbf{"backend": "http://a"}',
        b'{"backend": "\\ud800"}',
        b'{"backend": "http://a", "backend": NaN}',
        b'{"backend": "http://a", "more": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    ],
)
async def test_the_gateway_refuses_json_that_only_python_accepts(
    body: bytes, client: AsgiClient
) -> None:
    answer = await client.ask("POST", "/admin/drain", content=body, headers=JSON)
    assert answer.status_code == 422
    assert error_of(answer)["code"] == "invalid_body"
    assert not any(backend.draining for backend in client.gateway.pool.backends)


async def test_the_gateway_reads_little_of_an_endless_body_and_nothing_without_access(
    client: AsgiClient,
) -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1000
            yield b" " * 1000

    answer = await client.ask("POST", "/admin/drain", ELSEWHERE, content=endless(), headers=JSON)
    assert (answer.status_code, read) == (403, 0)
    answer = await client.ask("POST", "/admin/drain", content=endless(), headers=JSON)
    assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
    assert read <= 100_000


async def test_the_gateway_refuses_an_admin_order_sent_as_a_form(client: AsgiClient) -> None:
    # A browser sends such a form to another origin without a preflight request.
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        content = b'{"backend": "http://a"}'
        answer = await client.ask(
            "POST", "/admin/drain", content=content, headers={"content-type": kind}
        )
        assert answer.status_code == 422


ADMIN = [("GET", "/admin/backends"), ("POST", "/admin/drain"), ("POST", "/admin/undrain")]


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_without_a_key_only_this_machine_has_operator_access(
    method: str, path: str, client: AsgiClient
) -> None:
    body = {"backend": client.gateway.pool.backends[0].name}
    for here in (LOCAL, "::1", "127.9.9.9"):
        assert (await client.ask(method, path, here, json=body)).status_code == 200
    for away in (ELSEWHERE, "testclient", "", "10.0.0.1"):
        answer = await client.ask(method, path, away, json=body)
        assert answer.status_code == 403
        assert error_of(answer)["code"] == "admin_only"


@pytest.mark.parametrize(("method", "path"), ADMIN)
@pytest.mark.parametrize(
    "header",
    [
        {"x-forwarded-for": "192.0.2.7"},
        {"X-Real-IP": "192.0.2.7"},
        {"forwarded": "for=192.0.2.7"},
        {"via": "1.1 proxy"},
        {"origin": "https://page.example"},
        {"origin": "null"},
    ],
    ids=lambda header: next(iter(header)),
)
async def test_without_a_key_proxies_and_foreign_pages_have_no_operator_access(
    header: dict[str, str], method: str, path: str, client: AsgiClient
) -> None:
    body = {"backend": client.gateway.pool.backends[0].name}
    answer = await client.ask(method, path, json=body, headers=header)
    assert answer.status_code == 403
    error = error_of(answer)
    assert error["code"] == "admin_only"
    assert "VLLM_GATEWAY_ADMIN_KEY" in error["message"]
    here = {"origin": "http://localhost:7000"}
    assert (await client.ask(method, path, json=body, headers=here)).status_code == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_authorization_scheme_ignores_case(scheme: str) -> None:
    plan = replace(PLAN, admin_key="admin", clients=(ClientSpec(name="anna", key="key"),))
    client = client_of(plan)
    for path, key in (("/admin/backends", "admin"), ("/v1/models", "key")):
        answer = await client.get(path, headers={"authorization": f"{scheme} {key}"})
        assert answer.status_code == 200
        answer = await client.get(path, headers={"authorization": f"Basic {key}"})
        assert answer.status_code in (401, 403)


async def test_an_empty_admin_key_gives_no_access() -> None:
    client = client_of(replace(PLAN, admin_key=""))
    for headers in ({}, {"authorization": "Bearer "}):
        assert (await client.get("/admin/backends", headers=headers)).status_code == 403


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_with_a_key_only_its_holder_has_operator_access(method: str, path: str) -> None:
    client = client_of(replace(PLAN, admin_key="schlüssel"))
    body = {"backend": client.gateway.pool.backends[0].name}
    right = {"authorization": "Bearer schlüssel".encode()}
    answer = await client.ask(method, path, ELSEWHERE, json=body, headers=right)
    assert answer.status_code == 200
    for wrong in ({}, {"authorization": b"Bearer x"}, {"authorization": b"schl\xfcssel"}):
        answer = await client.ask(method, path, LOCAL, json=body, headers=wrong)
        assert answer.status_code == 403


async def test_prometheus_can_read_the_metrics(client: AsgiClient) -> None:
    gateway = client.gateway
    first, second = gateway.pool.backends
    gateway.totals.outcomes["anonymous", "ok"] += 2
    first.chosen()
    second.draining = True
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples["gateway_permits",] == 100
    assert samples["gateway_in_flight",] == samples["gateway_queued",] == 0
    assert samples["gateway_tasks",] >= 1
    assert samples["gateway_client_in_flight", "anonymous"] == 0
    assert samples["gateway_backend_in_flight", first.name] == 1
    assert samples["gateway_backend_connections", first.name] == 0
    assert samples["gateway_backend_up", first.name] == 1
    assert samples["gateway_backend_up", second.name] == 0
    assert samples["gateway_requests_total", "anonymous", "ok"] == 2


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
)
async def test_a_relayed_path_outside_our_server_is_501_with_the_reason(
    path: str, client: AsgiClient
) -> None:
    answer = await client.ask("POST", path, json={})
    assert answer.status_code == 501
    assert "GatewayProtocol" in error_of(answer)["message"]


async def test_an_unknown_path_gets_an_error_in_openais_shape(client: AsgiClient) -> None:
    answer = await client.get("/v1/nothing")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "not_found"
    answer = await client.get("/admin/drain")
    assert answer.status_code == 405
    assert error_of(answer)["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("GET", "/admin/drain", "POST"),
        ("DELETE", "/v1/health", "GET, HEAD"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/openapi.json", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_405_with_the_allowed_methods(
    method: str, path: str, allowed: str, client: AsgiClient
) -> None:
    answer = await client.ask(method, path)
    assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
    assert sorted(answer.headers["allow"].split(", ")) == sorted(allowed.split(", "))
