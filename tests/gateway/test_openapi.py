"""The gateway's OpenAPI page: it describes what the routes really take and answer."""

import json
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gateway.asgi_client import PLAN, AsgiClient, client_of
from proofserve.gateway import failures
from proofserve.gateway.failures import Failure
from proofserve.gateway.gateway import ROUTES
from proofserve.gateway.records import ClientSpec, GatewayPlan

pytestmark = pytest.mark.anyio
ADMIN_PATHS = ("/admin/backends", "/admin/drain", "/admin/undrain")


@pytest.fixture
async def client() -> AsgiClient:
    return client_of(PLAN)


async def test_the_page_describes_what_every_route_takes_and_answers(client: AsgiClient) -> None:
    page = (await client.get("/openapi.json")).json()
    routes = {
        (method, path): described
        for path, methods in page["paths"].items()
        for method, described in methods.items()
    }
    for (method, path), described in routes.items():
        assert ("requestBody" in described) is (method == "post"), path
        for status, answer in described["responses"].items():
            schemas = [each.get("schema") for each in answer["content"].values()]
            assert schemas[0] or status in ("4XX", "5XX"), (path, status)
    refusals = [each for each in vars(failures).values() if isinstance(each, Failure)]
    statuses = {str(each.status) for each in refusals}
    for path in ROUTES:
        relayed = routes["post", path.decode()]
        assert list(relayed["responses"]["200"]["content"]) == [
            "application/json",
            "text/event-stream",
        ]
        assert statuses <= relayed["responses"].keys()


OF_CLIENTS = (b"/v1/models", b"/v1/receipts/{response_id}")


async def test_the_page_asks_for_a_key_only_where_one_is_configured() -> None:
    async def secured(plan: GatewayPlan) -> dict[str, list[dict[str, Any]]]:
        page = (await client_of(plan).get("/openapi.json")).json()
        routes = {path: next(iter(each.values())) for path, each in page["paths"].items()}
        return {path: route["security"] for path, route in routes.items() if "security" in route}

    assert await secured(PLAN) == {}
    admin = {path: [{"admin": []}] for path in ADMIN_PATHS}
    assert await secured(replace(PLAN, admin_key="k")) == admin
    clients = {path.decode(): [{"client": []}] for path in (*ROUTES, *OF_CLIENTS)}
    assert await secured(replace(PLAN, clients=(ClientSpec(name="anna", key="k"),))) == clients


def schema_of(page: dict[str, Any], path: str, *keys: str) -> Draft202012Validator:
    found: Any = page["paths"][path]["post"]
    for key in (*keys, "content", "application/json", "schema"):
        found = found[key]
    return Draft202012Validator({**found, "components": page["components"]})


@pytest.mark.parametrize(
    ("path", "prompts"),
    [(path.decode(), route.prompts) for path, route in ROUTES.items() if not route.form],
)
async def test_the_page_requires_a_prompt(
    path: str, prompts: tuple[str, ...], client: AsgiClient
) -> None:
    page = (await client.get("/openapi.json")).json()
    body = schema_of(page, path, "requestBody")
    for prompt in prompts:
        assert body.is_valid({"model": "tiny", prompt: "Hello"})
    assert not body.is_valid({"model": "tiny", "max_tokens": 3})


# Errors of vLLM 0.32: its own, of its check of keys, of FastAPI, and of a proxy before it.
OF_BACKENDS: list[Any] = [
    {"error": {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}},
    {"error": {"message": "no", "type": "NotFoundError", "param": None, "code": 404}},
    {"error": "Unauthorized"},
    {"detail": "Not Found"},
]


@pytest.mark.parametrize("status", ["400", "401", "404", "503", "4XX", "5XX"])
async def test_errors_of_backends_match_the_page(status: str, client: AsgiClient) -> None:
    page = (await client.get("/openapi.json")).json()
    schema = schema_of(page, "/v1/chat/completions", "responses", status)
    for error in OF_BACKENDS:
        assert schema.is_valid(error), error
    assert schema.is_valid(json.loads(failures.UNKNOWN_MODEL.body()))
