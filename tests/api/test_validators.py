"""What a validator's key permits: every route of a node and of a fleet, and its budget."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from api.distance_bodies import CLAIMS, INIT_VALIDATE, ROUND, VALIDATE
from api.support import GENERATE, JOB, ORDER, START, STATUS, STOP, Server, serving
from api.test_access import ACCESS, HEADERS, whole
from fleet.servers import members
from proofserve.api import node_page
from proofserve.api.access import Access, Caller, CallLimits, Role, known_key
from proofserve.settings.fleet import FleetSettings
from proofserve.wiring.fleet import running_fleet
from support.pace import until

pytestmark = pytest.mark.anyio

KEY = {"Authorization": "Bearer auditors-secret"}
OF_OPERATORS = HEADERS["operator"]
WAIT = {**JOB, "wait": True}
# Beside GET, a validator's key permits these and nothing else.
PERMITTED = {("POST", f"/api/v1/pow/{name}") for name in ("generate", "validate", "open")}
# Members sign their callbacks, and have no key.
SIGNED = "/api/v1/fleet/members/{member_id}/lanes/"


def budgeted(nonces: int | None = None) -> Access:
    caller = Caller("auditor", Role.VALIDATOR, nonces_per_hour=nonces)
    other = Caller("other", Role.VALIDATOR)
    operator = known_key("operators-secret", Caller("operator", Role.OPERATOR))
    return Access(
        [known_key("auditors-secret", caller), known_key("others-secret", other), operator]
    )


async def tried(app: FastAPI) -> dict[tuple[str, str], int]:
    """The status that a validator's key gets from every route of ``app``, by method and path."""
    transport = httpx.ASGITransport(app, client=("10.0.0.1", 50_000))
    found = {}
    async with httpx.AsyncClient(transport=transport, base_url="http://node", headers=KEY) as http:
        for route in app.routes:
            if not isinstance(route, APIRoute) or route.path.endswith("/events"):
                # FastAPI's pages, and a stream that does not end: `test_the_stream` has it.
                continue
            names = dict.fromkeys(route.param_convertors, "x")
            for method in route.methods:
                answer = await http.request(
                    method, route.path_format.format(**names), json={"n": 1}
                )
                found[method, route.path] = answer.status_code
    return found


async def until_ready(app: FastAPI) -> None:
    """Until a member has answered: before, a fleet refuses every order."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as http:

        async def ready() -> bool:
            return (await http.get("/api/v1/pow/health/ready")).is_success

        await until(ready, 60.0)


def require_rule(found: dict[tuple[str, str], int]) -> None:
    for (method, path), status in found.items():
        if method == "GET" or (method, path) in PERMITTED:
            assert status not in (401, 403), (method, path)
        elif not path.startswith(SIGNED):
            assert status == 403, (method, path)


async def test_every_route_of_a_node_with_a_validators_key() -> None:
    server = whole(access=ACCESS)
    server.app.include_router(node_page.router(lambda _: server.node))
    found = await tried(server.app)
    require_rule(found)
    assert found.keys() >= PERMITTED
    assert ("POST", "/api/v1/pow/measure") in found
    assert ("GET", "/dashboard/snapshot") in found
    assert sum(status == 403 for status in found.values()) == 7
    assert server.node.manager.status().state == "IDLE"
    await server.node.manager.aclose()


async def test_every_route_of_a_fleet_with_a_validators_key(tmp_path: Path) -> None:
    keys = {"api_key": "operator", "validator_key": "auditors-secret", "join_key": "joiner"}
    async with members(tmp_path, 1) as made:
        database = str(tmp_path / "fleet.sqlite")
        settings = FleetSettings(database=database, member=made[0].url, **keys)
        async with running_fleet(settings, "http://127.0.0.1:9") as app:
            await until_ready(app)
            found = await tried(app)
    require_rule(found)
    assert found.keys() >= PERMITTED
    refused = {path for (_, path), status in found.items() if status == 403}
    assert {"/api/v1/fleet/members", "/api/v1/fleet/members/{member_id}/verify"} <= refused


async def test_the_stream_of_the_page_is_for_reading(server: Server) -> None:
    (events,) = (
        route
        for route in node_page.router(lambda _: server.node).routes
        if isinstance(route, APIRoute) and route.path.endswith("/events")
    )
    assert events.methods == {"GET"}


async def test_a_challenge_is_computed_for_its_block_and_counted_by_the_hour() -> None:
    async with serving(access=budgeted(), call_limits=CallLimits(nonces_per_hour=10)) as server:
        answer = await server.client.post(GENERATE, json={**WAIT, "nonces": [5, 6]}, headers=KEY)
        body = answer.json()
        assert (body["block_hash"], body["public_key"], body["block_height"]) == ("block", "key", 7)
        assert [each["nonce"] for each in body["artifacts"]] == [5, 6]
        many = {**WAIT, "nonces": list(range(9))}
        refused = await server.client.post(GENERATE, json=many, headers=KEY)
        assert refused.status_code == 429
        assert 3590 <= int(refused.headers["retry-after"]) <= 3600
        detail = refused.json()["detail"]
        assert "auditor may have 10 nonces computed in an hour" in detail
        assert "8 are left, and all of them again in 3" in detail
        rest = {**WAIT, "nonces": list(range(8))}
        assert (await server.client.post(GENERATE, json=rest, headers=KEY)).status_code == 200
        assert (await server.client.post(GENERATE, json=WAIT, headers=KEY)).status_code == 429
        assert server.engine.calls == [(5, 6), tuple(range(8))]
        # Each key has its own budget, and an operator's has none.
        for other in ({"Authorization": "Bearer others-secret"}, OF_OPERATORS):
            assert (await server.client.post(GENERATE, json=WAIT, headers=other)).status_code == 200
        # Reading costs nothing.
        assert (await server.client.get(STATUS, headers=KEY)).status_code == 200


async def test_a_keys_own_budget_goes_before_the_servers() -> None:
    async with serving(access=budgeted(3), call_limits=CallLimits(nonces_per_hour=1000)) as server:
        never = await server.client.post(GENERATE, json=WAIT, headers=KEY)
        assert never.status_code == 422
        assert "4 are more than the 3 that auditor has in an hour" in never.text
        fits = {**WAIT, "nonces": [1, 2, 3]}
        assert (await server.client.post(GENERATE, json=fits, headers=KEY)).status_code == 200


async def test_both_protocols_share_the_budget() -> None:
    async with serving(access=budgeted(), call_limits=CallLimits(nonces_per_hour=5)) as server:
        await server.client.post("/init", json=ROUND, headers=OF_OPERATORS)
        first = await server.client.post(VALIDATE, json=CLAIMS, headers=KEY)
        assert first.status_code == 200, first.text
        assert len(first.json()["computed_distances"]) == 3
        assert (await server.client.post(VALIDATE, json=CLAIMS, headers=KEY)).status_code == 429


@pytest.mark.parametrize(
    "change",
    [
        {"wait": False},
        {"url": "http://127.0.0.1:9/cb"},
        {"validation": {"artifacts": [{"nonce": n, "vector_b64": ""} for n in JOB["nonces"]]}},
    ],
)
async def test_a_challenge_orders_neither_callbacks_nor_verdicts(change: dict[str, Any]) -> None:
    async with serving(access=budgeted()) as server:
        refused = await server.client.post(GENERATE, json={**WAIT, **change}, headers=KEY)
        assert refused.status_code == 403
        assert "send wait true, and neither url nor validation" in refused.text
        assert server.engine.calls == []
        allowed = await server.client.post(GENERATE, json={**WAIT, **change}, headers=OF_OPERATORS)
        assert allowed.status_code == 200


async def test_a_challenge_has_no_longer_forward_than_the_operator_chose() -> None:
    """Chat waits for a forward; 256 tokens are the network's own number."""
    long = {**WAIT, "params": {**JOB["params"], "seq_len": 257}}
    async with serving(access=budgeted()) as server:
        refused = await server.client.post(GENERATE, json=long, headers=KEY)
        assert refused.status_code == 422
        assert "257 is more than the 256 tokens" in refused.text
        allowed = await server.client.post(GENERATE, json=long, headers=OF_OPERATORS)
        assert allowed.status_code == 200
    async with serving(access=budgeted(), seq_len=257) as server:
        assert (await server.client.post(GENERATE, json=long, headers=KEY)).status_code == 200


async def test_a_challenge_waits_for_the_running_round_one_at_a_time() -> None:
    async with waiting_challenge() as server:
        computed = len(server.engine.calls)
        async with asyncio.timeout(60):
            second = await server.client.post(GENERATE, json=WAIT, headers=KEY)
        assert second.status_code == 429
        assert "one at a time" in second.text
        # The round goes on meanwhile.
        await until(lambda: len(server.engine.calls) > computed + 2)
        assert (await server.client.post(STOP, headers=KEY)).status_code == 403


@asynccontextmanager
async def waiting_challenge() -> AsyncIterator[Server]:
    """A server whose round runs, and a challenge that waits; at the end the round ends, too."""
    async with serving(access=budgeted()) as server:
        assert (await server.client.post(START, json=ORDER, headers=OF_OPERATORS)).is_success
        challenge = asyncio.create_task(server.client.post(GENERATE, json=WAIT, headers=KEY))
        await until(lambda: server.node.manager.status().queue.queued_nonces == len(WAIT["nonces"]))
        yield server
        assert not challenge.done()
        assert (await server.client.post(STOP, headers=OF_OPERATORS)).is_success
        assert len((await challenge).json()["artifacts"]) == len(WAIT["nonces"])
        # The end of the call makes room for the next one.
        assert (await server.client.post(GENERATE, json=WAIT, headers=KEY)).status_code == 200


async def test_a_verdict_for_a_validator_is_no_part_of_the_round() -> None:
    async with serving(access=budgeted()) as server:
        order = {**ROUND, "callback_url": "http://x/cb"}
        await server.client.post(INIT_VALIDATE, json=order, headers=OF_OPERATORS)
        before = (await server.client.get(STATUS, headers=KEY)).json()["stats"]
        assert (await server.client.post(VALIDATE, json=CLAIMS, headers=KEY)).is_success
        after = (await server.client.get(STATUS, headers=KEY)).json()["stats"]
        assert after["total_processed"] == before["total_processed"] == 0
        assert server.outbox.callbacks == []
        assert (await server.client.post(VALIDATE, json=CLAIMS, headers=OF_OPERATORS)).is_success
        assert len(server.outbox.callbacks) == 1
