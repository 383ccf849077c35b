"""The gateway's own endpoints, through the application."""

from collections.abc import AsyncIterator
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.asgi_client import LOCAL, PLAN, AsgiClient, desk_of, error_of, opened
from gateway.asked import asked, listing
from proofserve.gateway.records import BackendSpec, ClientSpec

pytestmark = pytest.mark.anyio
ELSEWHERE = "192.0.2.7"
JSON = {"content-type": "application/json"}


@pytest.fixture
async def desk() -> AsgiClient:
    return desk_of(PLAN)


@pytest.mark.parametrize("path", ["/v1/health", "/health"])
async def test_health_is_ok_until_a_shutdown_begins(path: str, desk: AsgiClient) -> None:
    answer = await desk.get(path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    desk.gateway.draining = True
    answer = await desk.get(path)
    assert (answer.status_code, answer.json()) == (503, {"status": "draining"})


async def test_ready_is_who_has_a_backend(desk: AsgiClient) -> None:
    first, second = desk.gateway.fleet.backends
    answer = await desk.get("/health/ready")
    assert answer.json() == {"status": "ok", "backends": [first.name, second.name]}
    first.healthy = False
    assert (await desk.get("/health/ready")).json()["backends"] == [second.name]
    second.draining = True
    answer = await desk.get("/health/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "no backend")
    assert (await desk.get("/health")).status_code == 200
    first.healthy = True
    desk.gateway.draining = True
    answer = await desk.get("/health/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "draining")


async def test_models_of_all_backends_are_merged() -> None:
    async with asked() as one, asked() as two, asked() as gone:
        one.models = listing("tiny", "shared", owned_by="first")
        two.models = listing("shared", "large", owned_by="second")
        gone.health = HTTPStatus.NOT_FOUND
        specs = tuple(BackendSpec(each.url) for each in (one, two, gone))
        async with opened(replace(PLAN, backends=specs)) as desk:
            await merged(desk)


async def merged(desk: AsgiClient) -> None:
    body = (await desk.get("/v1/models")).json()
    assert body["object"] == "list"
    owners = {each["id"]: each["owned_by"] for each in body["data"]}
    assert owners == {"tiny": "first", "shared": "first", "large": "second"}
    assert len(body["data"]) == 3
    desk.gateway.fleet.backends[0].healthy = False
    left = (await desk.get("/v1/models")).json()["data"]
    assert {each["id"] for each in left} == {"shared", "large"}
    desk.gateway.fleet.backends[1].draining = True
    assert (await desk.get("/v1/models")).json()["data"] == []


async def test_backends_that_nobody_could_ask_have_no_models(desk: AsgiClient) -> None:
    assert (await desk.get("/v1/models")).json()["data"] == []
    assert (await desk.get("/admin/backends")).json()[0]["models"] is None


async def test_models_are_told_to_keys_only() -> None:
    desk = desk_of(replace(PLAN, clients=(ClientSpec(name="anna", key="schlüssel"),)))
    for wrong in ({}, {"authorization": "Bearer other"}):
        answer = await desk.get("/v1/models", headers=wrong)
        assert answer.status_code == 401
        assert error_of(answer)["code"] == "invalid_api_key"
    right = {"authorization": "Bearer schlüssel".encode()}
    assert (await desk.get("/v1/models", headers=right)).status_code == 200


async def test_every_backend_is_shown_as_it_is(desk: AsgiClient) -> None:
    first, second = desk.gateway.fleet.backends
    first.models = {"tiny": {}}
    first.chosen()
    shown = (await desk.get("/admin/backends")).json()
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


async def test_a_backend_drains_and_comes_back(desk: AsgiClient) -> None:
    first, second = desk.gateway.fleet.backends
    which = {"backend": first.name}
    answer = await desk.ask("POST", "/admin/drain", json=which)
    assert (answer.status_code, answer.json()["draining"]) == (200, True)
    assert {desk.gateway.fleet.choose(None, b"", ()) for _ in range(4)} == {second}
    answer = await desk.ask("POST", "/admin/undrain", json=which)
    assert answer.json()["draining"] is False
    assert {desk.gateway.fleet.choose(None, b"", ()) for _ in range(4)} == {first, second}


async def test_a_backend_that_is_none_is_refused_with_those_that_are(desk: AsgiClient) -> None:
    answer = await desk.ask("POST", "/admin/drain", json={"backend": "http://nobody"})
    assert answer.status_code == 404
    error = error_of(answer)
    assert (error["code"], error["param"]) == ("unknown_backend", "backend")
    for backend in desk.gateway.fleet.backends:
        assert backend.name in error["message"]
    answer = await desk.ask("POST", "/admin/drain", json={"backend": "b" * 60_000})
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
async def test_a_body_that_cannot_be_meant_names_the_field(
    sent: dict[str, Any], field: str, desk: AsgiClient
) -> None:
    answer = await desk.ask("POST", "/admin/drain", **sent)
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
async def test_what_only_python_calls_json_is_refused(body: bytes, desk: AsgiClient) -> None:
    answer = await desk.ask("POST", "/admin/drain", content=body, headers=JSON)
    assert answer.status_code == 422
    assert error_of(answer)["code"] == "invalid_body"
    assert not any(backend.draining for backend in desk.gateway.fleet.backends)


async def test_of_a_body_without_end_little_is_read_and_nothing_for_a_stranger(
    desk: AsgiClient,
) -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1000
            yield b" " * 1000

    answer = await desk.ask("POST", "/admin/drain", ELSEWHERE, content=endless(), headers=JSON)
    assert (answer.status_code, read) == (403, 0)
    answer = await desk.ask("POST", "/admin/drain", content=endless(), headers=JSON)
    assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
    assert read <= 100_000


async def test_a_form_of_another_page_is_no_order(desk: AsgiClient) -> None:
    # A browser sends it without asking.
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        content = b'{"backend": "http://a"}'
        answer = await desk.ask(
            "POST", "/admin/drain", content=content, headers={"content-type": kind}
        )
        assert answer.status_code == 422


ADMIN = [("GET", "/admin/backends"), ("POST", "/admin/drain"), ("POST", "/admin/undrain")]


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_without_a_key_only_this_machine_is_an_operator(
    method: str, path: str, desk: AsgiClient
) -> None:
    body = {"backend": desk.gateway.fleet.backends[0].name}
    for here in (LOCAL, "::1", "127.9.9.9"):
        assert (await desk.ask(method, path, here, json=body)).status_code == 200
    for away in (ELSEWHERE, "testclient", "", "10.0.0.1"):
        answer = await desk.ask(method, path, away, json=body)
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
async def test_without_a_key_proxies_and_foreign_pages_are_no_operators(
    header: dict[str, str], method: str, path: str, desk: AsgiClient
) -> None:
    body = {"backend": desk.gateway.fleet.backends[0].name}
    answer = await desk.ask(method, path, json=body, headers=header)
    assert answer.status_code == 403
    error = error_of(answer)
    assert error["code"] == "admin_only"
    assert "VLLM_GATEWAY_ADMIN_KEY" in error["message"]
    here = {"origin": "http://localhost:7000"}
    assert (await desk.ask(method, path, json=body, headers=here)).status_code == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_scheme_of_a_key_has_no_case(scheme: str) -> None:
    plan = replace(PLAN, admin_key="admin", clients=(ClientSpec(name="anna", key="key"),))
    desk = desk_of(plan)
    for path, key in (("/admin/backends", "admin"), ("/v1/models", "key")):
        answer = await desk.get(path, headers={"authorization": f"{scheme} {key}"})
        assert answer.status_code == 200
        answer = await desk.get(path, headers={"authorization": f"Basic {key}"})
        assert answer.status_code in (401, 403)


async def test_an_empty_admin_key_lets_nobody_in() -> None:
    desk = desk_of(replace(PLAN, admin_key=""))
    for headers in ({}, {"authorization": "Bearer "}):
        assert (await desk.get("/admin/backends", headers=headers)).status_code == 403


@pytest.mark.parametrize(("method", "path"), ADMIN)
async def test_with_a_key_its_holder_is_the_operator(method: str, path: str) -> None:
    desk = desk_of(replace(PLAN, admin_key="schlüssel"))
    body = {"backend": desk.gateway.fleet.backends[0].name}
    right = {"authorization": "Bearer schlüssel".encode()}
    answer = await desk.ask(method, path, ELSEWHERE, json=body, headers=right)
    assert answer.status_code == 200
    for wrong in ({}, {"authorization": b"Bearer x"}, {"authorization": b"schl\xfcssel"}):
        answer = await desk.ask(method, path, LOCAL, json=body, headers=wrong)
        assert answer.status_code == 403


async def test_metrics_can_be_read_by_prometheus(desk: AsgiClient) -> None:
    gateway = desk.gateway
    first, second = gateway.fleet.backends
    gateway.totals.outcomes["anonymous", "ok"] += 2
    first.chosen()
    second.draining = True
    answer = await desk.get("/metrics")
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
async def test_the_relay_needs_our_own_server_and_says_so(path: str, desk: AsgiClient) -> None:
    answer = await desk.ask("POST", path, json={})
    assert answer.status_code == 501
    assert "GatewayProtocol" in error_of(answer)["message"]


async def test_what_is_not_there_is_told_in_openais_shape(desk: AsgiClient) -> None:
    answer = await desk.get("/v1/nothing")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "not_found"
    answer = await desk.get("/admin/drain")
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
async def test_a_wrong_method_is_told_the_right_ones(
    method: str, path: str, allowed: str, desk: AsgiClient
) -> None:
    answer = await desk.ask(method, path)
    assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
    assert sorted(answer.headers["allow"].split(", ")) == sorted(allowed.split(", "))
