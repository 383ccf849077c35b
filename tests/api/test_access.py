"""Access: every route, called by every kind of client."""

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request

from api.support import JOB, ORDER, Server, serving
from proofserve.api import proof_routes, routes
from proofserve.api.access import Access, ApiError, Caller, Role, known_key
from proofserve.wire import PROOFS, RECEIPTS

pytestmark = pytest.mark.anyio

OPERATORS_KEY, VIEWERS_KEY, VALIDATORS_KEY = "operators-secret", "viewers-secret", "auditors-secret"
ACCESS = Access(
    [
        known_key(OPERATORS_KEY, Caller("operator", Role.OPERATOR)),
        known_key(VIEWERS_KEY, Caller("screen", Role.VIEWER)),
        known_key(VALIDATORS_KEY, Caller("auditor", Role.VALIDATOR)),
    ]
)
FOR_VIEWERS = {
    ("GET", "/health/deep"),
    ("GET", "/status"),
    ("GET", "/results"),
    ("GET", "/versions"),
    ("GET", "/metrics"),
    ("GET", "/generate/{request_id}"),
}
# Supervisors and load balancers have no key.
FOR_ALL = {("GET", f"/health/{check}") for check in ("live", "ready", "engine")}
# Not below the prefix of proofs; tests/receipts calls them.
FOR_CLIENTS = {("GET", f"{RECEIPTS}/log"), ("GET", f"{RECEIPTS}/{{response_id}}")}
FOR_OPERATORS = {
    ("POST", "/init"),
    ("POST", "/init/generate"),
    ("POST", "/init/validate"),
    ("POST", "/phase/generate"),
    ("POST", "/phase/validate"),
    ("POST", "/stop"),
    ("POST", "/measure"),
}
FOR_VALIDATORS = {("POST", "/generate"), ("POST", "/validate"), ("POST", "/open")}
EVERYTHING = sorted(FOR_VIEWERS | FOR_VALIDATORS | FOR_OPERATORS)
# Whose key does not permit which calls.
REFUSED = {"viewer": FOR_VALIDATORS | FOR_OPERATORS, "validator": FOR_OPERATORS}
HEADERS = {
    "no key": {},
    "wrong key": {"Authorization": "Bearer operators-secreT"},
    "viewer": {"Authorization": f"Bearer {VIEWERS_KEY}"},
    "validator": {"Authorization": f"Bearer {VALIDATORS_KEY}"},
    "operator": {"Authorization": f"bearer {OPERATORS_KEY}"},
}


def whole(**deployed: Any) -> Server:
    """A server with all routes, including /measure."""
    made = Server(**deployed)

    def no_engine(_request: Request) -> Any:
        raise ZeroDivisionError

    made.app.include_router(proof_routes.measure_router(lambda _: made.node, no_engine))
    return made


def at(server: Server, host: str | None = "127.0.0.1") -> httpx.AsyncClient:
    """A client with this address; None is a client on a unix socket."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if host is None:
            scope = {**scope, "client": None, "server": ("/run/http.sock", None)}
        await server(scope, receive, send)

    transport = httpx.ASGITransport(app, client=(host or "", 50_000))
    return httpx.AsyncClient(transport=transport, base_url=f"http://node{PROOFS}")


def test_the_lists_name_every_route() -> None:
    server = whole()
    # FastAPI's own routes are not below our prefix.
    paths = server.app.openapi()["paths"].items()
    found = {
        (method.upper(), path.removeprefix(PROOFS)) for path, methods in paths for method in methods
    }
    assert found == FOR_ALL | FOR_CLIENTS | set(EVERYTHING)


@pytest.mark.parametrize("who", HEADERS)
async def test_every_route_by_every_caller(who: str) -> None:
    server = whole(access=ACCESS)
    async with at(server) as client:
        for _, path in FOR_ALL:
            assert (await client.get(path, headers=HEADERS[who])).status_code == 200
        for method, path in EVERYTHING:
            place = path.format(request_id="x")
            response = await client.request(method, place, headers=HEADERS[who], json={"n": 1})
            if who in {"no key", "wrong key"}:
                assert response.status_code == 401, path
                assert response.headers["www-authenticate"] == "Bearer"
                assert "Authorization: Bearer" in response.json()["detail"]
            elif (method, path) in REFUSED.get(who, ()):
                assert response.status_code == 403, path
                assert f"this is a {who}'s key" in response.json()["detail"]
                assert "operator's" in response.json()["detail"]
            else:
                assert response.status_code not in (401, 403), path
    # Only an operator's /stop has changed the state.
    state = server.node.manager.status().state
    assert state == ("STOPPED" if who == "operator" else "IDLE")
    await server.node.manager.aclose()


@pytest.mark.parametrize(
    "header",
    [
        OPERATORS_KEY,
        f"Basic {OPERATORS_KEY}",
        "Bearer",
        "Bearer ",
        f"Bearer {OPERATORS_KEY} {OPERATORS_KEY}",
        f"Bearer {OPERATORS_KEY[:-1]}",
        "Bearer \xff\xfe",
    ],
)
async def test_a_malformed_authorization_header_is_401(header: str) -> None:
    async with serving(access=ACCESS) as server:
        headers = [(b"authorization", header.encode("latin-1"))]
        assert (await server.client.get("/status", headers=headers)).status_code == 401


async def test_a_request_with_two_keys_is_refused() -> None:
    async with serving(access=ACCESS) as server:
        twice = [("authorization", f"Bearer {OPERATORS_KEY}")] * 2
        assert (await server.client.get("/status", headers=twice)).status_code == 401


async def test_a_refusal_of_access_says_nothing_about_the_body() -> None:
    async with serving(access=ACCESS) as server:
        for body in (b"{", b"x" * 1000, json.dumps(JOB).encode()):
            response = await server.client.post("/generate", content=body)
            assert response.status_code == 401


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", None])
async def test_without_keys_this_machine_has_operator_access(host: str | None) -> None:
    async with serving() as server, at(server, host) as client:
        assert (await client.get("/status")).status_code == 200
        assert (await client.post("/init/generate", json=ORDER)).status_code == 200


@pytest.mark.parametrize("host", ["10.0.0.1", "8.8.8.8", "::ffff:8.8.8.8", "fe80::1", "::", "node"])
async def test_without_keys_other_machines_have_no_access(host: str) -> None:
    async with serving() as server, at(server, host) as client:
        for method, path in (("GET", "/status"), ("POST", "/stop")):
            for headers in HEADERS.values():
                response = await client.request(method, path, headers=headers)
                assert response.status_code == 403
                assert "--poc-api-key" in response.json()["detail"]


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Forwarded-For": "127.0.0.1"},
        {"X-Forwarded-Host": "localhost"},
        {"X-Real-IP": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
        {"Via": "1.1 proxy"},
        {"Origin": "https://somewhere.example"},
        {"Origin": "http://127.0.0.1.somewhere.example"},
        {"Origin": "http://["},
        {"Origin": "null"},
    ],
)
async def test_requests_of_proxies_and_web_pages_do_not_count_as_this_machine(
    headers: dict[str, str],
) -> None:
    async with serving() as server:
        for host in ("127.0.0.1", None):
            async with at(server, host) as client:
                assert (await client.post("/stop", headers=headers)).status_code == 403


@pytest.mark.parametrize("origin", ["http://localhost:8000", "http://127.0.0.1", "http://[::1]:8"])
async def test_a_web_page_of_this_machine_has_access(origin: str) -> None:
    async with serving() as server, at(server) as client:
        assert (await client.post("/stop", headers={"Origin": origin})).status_code == 200


async def test_a_client_without_an_address_has_no_access() -> None:
    scope = {"type": "http", "headers": [], "client": None, "server": ("node", 80)}
    with pytest.raises(ApiError, match="another machine"):
        Access().admit(Request(scope), Role.VIEWER)
    with pytest.raises(ApiError, match="another machine"):
        Access().admit(Request({**scope, "server": None}), Role.VIEWER)


async def test_open_access_accepts_every_client() -> None:
    async with serving(access=Access(open_to_all=True)) as server, at(server, "8.8.8.8") as client:
        assert (await client.post("/stop", headers={"X-Forwarded-For": "9.9.9.9"})).is_success


async def test_with_keys_this_machine_needs_a_key_too() -> None:
    async with serving(access=ACCESS) as server, at(server, None) as client:
        assert (await client.get("/status")).status_code == 401


def test_invalid_keys_are_refused() -> None:
    twins = [
        known_key("same", Caller("a", Role.VIEWER)),
        known_key("same", Caller("b", Role.OPERATOR)),
    ]
    with pytest.raises(ValueError, match="equal"):
        Access(twins)
    with pytest.raises(ValueError, match="contradict"):
        Access(twins[:1], open_to_all=True)


def test_a_key_is_never_shown() -> None:
    keys = [known_key(OPERATORS_KEY, Caller("operator", Role.OPERATOR))]
    access = Access(keys)
    assert OPERATORS_KEY not in f"{keys} {access!r} {vars(access)} {access.names}"


def test_the_openapi_page_declares_authorization_if_there_are_keys() -> None:
    for path, methods in whole().app.openapi()["paths"].items():
        for method, operation in methods.items():
            if (method.upper(), path.removeprefix(PROOFS)) in FOR_ALL | FOR_CLIENTS:
                assert "security" not in operation, path
                assert not {"401", "403"} & operation["responses"].keys(), path
                continue
            assert operation["security"] == [{"HTTPBearer": []}], path
            if not path.endswith("/measure"):
                assert {"401", "403"} <= operation["responses"].keys()


def test_the_openapi_page_declares_no_authorization_without_keys() -> None:
    app = FastAPI()
    app.include_router(routes.router(lambda _: Server().node, has_keys=False))
    page = app.openapi()
    assert "securitySchemes" not in page["components"]
    for path, methods in page["paths"].items():
        assert all("security" not in operation for operation in methods.values()), path


async def test_readiness_without_a_key_shows_a_status_and_no_reason() -> None:
    async with serving(access=ACCESS) as server:
        server.engine.gone, server.outbox.full = True, "/secret/path is full"
        reply = await server.client.get("/health/ready")
        assert reply.status_code == 503
        assert reply.json() == {"detail": {"engine": "failed", "outbox": "failed"}}
        told = await server.client.get("/health/ready", headers=HEADERS["viewer"])
        assert told.json()["detail"]["outbox"] == "/secret/path is full"
        server.engine.gone = False
