"""Several API processes of a server: one owns the node, and every one answers every call."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.support import JOB, ORDER
from proofserve.outbox.database import OutboxInUse
from proofserve.wiring import owner as address
from proofserve.wiring.owner import CLIENT
from support.pace import until
from wiring.api_process import ApiProcess, settings_in

pytestmark = pytest.mark.anyio

REMOTE = ("203.0.113.9", 4711)


def client(process: ApiProcess, peer: tuple[str, int] = ("127.0.0.1", 4711)) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(process.app, client=peer)
    return httpx.AsyncClient(transport=transport, base_url="http://node/api/v1/pow", timeout=30)


@asynccontextmanager
async def two(folder: Path, **settings: Any) -> AsyncIterator[tuple[ApiProcess, ApiProcess]]:
    """The owner, and a process that passes calls on to it."""
    async with AsyncExitStack() as running:
        made = [ApiProcess(settings_in(folder, **settings), server="one") for _ in range(2)]
        for process in made:
            await running.enter_async_context(process.ownership.running())
        owner, other = made
        assert owner.ownership.node is not None
        assert other.ownership.node is None
        yield owner, other


async def rows_of(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    answer = await http.get("/results?limit=10000")
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()["results"]
    return rows


async def test_any_process_answers_any_call(tmp_path: Path) -> None:
    async with two(tmp_path) as (owner, other), client(owner) as one, client(other) as two_:
        started = await two_.post("/init/generate", json=ORDER)
        assert started.status_code == 200, started.text
        for http in (one, two_):
            assert (await http.get("/status")).json()["status"] == "GENERATING"
        again = await two_.post("/init/generate", json=ORDER)
        assert (again.status_code, again.json()) == (409, {"detail": "Already generating"})
        refused = await two_.post("/init/generate", json={**ORDER, "block_height": "no"})
        assert refused.status_code == 422
        stopped = await two_.post("/stop")
        assert stopped.json()["pow_status"]["status"] == "STOPPED"
        assert await rows_of(one) == await rows_of(two_)
        done = await two_.post("/generate", json={**JOB, "wait": True})
        assert len(done.json()["artifacts"]) == 4
        assert (await two_.get("/nothing")).status_code == 404
        assert (await two_.get("/health/live")).json() == {"status": "ok"}
        assert other.engine.calls == []


async def test_the_next_owner_goes_on_with_the_round_and_no_nonce_is_lost_or_twice(
    tmp_path: Path,
) -> None:
    async with two(tmp_path) as (owner, other), client(owner) as one, client(other) as two_:
        await two_.post("/init/generate", json=ORDER)
        await until(lambda: len(owner.engine.calls) > 20)
        round_id = (await two_.get("/status")).json()["round_id"]
        await owner.ownership.end()
        # Calls wait for the next owner, and need no attempt more.
        status = (await two_.get("/status")).json()
        assert (status["status"], status["round_id"]) == ("GENERATING", round_id)
        assert (owner.taken_over, other.taken_over) == (1, 1)
        await until(lambda: len(other.engine.calls) > 20)
        await two_.post("/stop")
        nonces = [row["nonce"] for row in await rows_of(two_)]
        assert nonces == [1 + 3 * index for index in range(len(nonces))]
        # The process that ended its node is about to end, and waits for no owner.
        ended = await one.get("/status")
        assert ended.status_code == 503


async def test_a_process_without_an_owner_waits_and_then_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proofserve.wiring.owner.NEXT_OWNER_S", 0.3)
    async with two(tmp_path) as (_, other), client(other) as http:
        address.address_file(tmp_path / "outbox.sqlite").unlink()
        answer = await http.get("/status")
        assert answer.status_code == 503
        assert "no API process owns the proofs" in answer.json()["detail"]
        assert answer.headers["retry-after"] == "1"


async def test_another_server_with_the_same_outbox_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(tmp_path) as (owner, _), client(owner) as http:
        monkeypatch.setattr(address, "START_S", 0.5)
        stranger = ApiProcess(settings_in(tmp_path), server="two")
        with pytest.raises(OutboxInUse, match="another running server uses the outbox"):
            async with stranger.ownership.running():
                pytest.fail("the stranger should not have started")
        assert stranger.taken_over == 0
        assert (await http.get("/status")).status_code == 200


async def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "outbox.sqlite").write_text("dear diary" * 100)
    process = ApiProcess(settings_in(tmp_path), server="one")
    with pytest.raises(Exception, match="not a database"):
        async with process.ownership.running():
            pytest.fail("the process should not have started")


async def test_keys_are_checked_as_if_the_client_had_come_to_the_owner(tmp_path: Path) -> None:
    keys = {
        "api_key": "operators-key",
        "viewer_key": "viewers-key",
        "validator_key": "validators-key",
    }
    async with two(tmp_path, **keys) as (owner, other), client(other, REMOTE) as http:
        assert (await http.get("/status")).status_code == 401
        # A body is not even read without a key.
        large = await http.post("/generate", content=b"x" * 10**6)
        assert large.status_code == 401
        viewer = {"Authorization": "Bearer viewers-key"}
        assert (await http.get("/status", headers=viewer)).status_code == 200
        assert (await http.post("/stop", headers=viewer)).status_code == 403
        validator = {"Authorization": "Bearer validators-key"}
        challenge = await http.post("/generate", json={**JOB, "wait": True}, headers=validator)
        assert len(challenge.json()["artifacts"]) == len(JOB["nonces"])
        assert (await http.post("/generate", json=JOB, headers=viewer)).status_code == 403
        assert (await http.post("/stop", headers=validator)).status_code == 403
        operator = {"Authorization": "Bearer operators-key"}
        assert (await http.post("/stop", headers=operator)).status_code == 200
        assert (await http.get("/health/ready")).status_code == 200
        assert owner.engine.leases == 0


async def test_without_keys_only_clients_of_this_machine_are_served(tmp_path: Path) -> None:
    async with two(tmp_path) as (_, other):
        async with client(other, REMOTE) as http:
            for method, path in (("GET", "/status"), ("POST", "/stop")):
                assert (await http.request(method, path)).status_code == 403
            # A client cannot name another address than its own, nor a proxy pass for a client here.
            forged = {CLIENT.decode(): json.dumps([["127.0.0.1", 1], None])}
            assert (await http.get("/status", headers=forged)).status_code == 403
        async with client(other) as http:
            assert (await http.get("/status")).status_code == 200
            proxied = await http.get("/status", headers={"X-Forwarded-For": "127.0.0.1"})
            assert proxied.status_code == 403


async def test_the_socket_alone_opens_nothing(tmp_path: Path) -> None:
    """Who can open the owner's socket, and names no client, counts as another machine."""
    async with two(tmp_path) as (owner, _):
        found = owner.ownership.owner
        assert found is not None
        transport = httpx.AsyncHTTPTransport(uds=found)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            assert (await http.get("/api/v1/pow/status")).status_code == 403


async def test_a_body_larger_than_the_limit_is_refused_where_it_comes(tmp_path: Path) -> None:
    async with two(tmp_path, max_body_bytes=1000) as (_, other), client(other) as http:
        answer = await http.post("/generate", content=b"x" * 1001)
        assert answer.status_code == 413
        assert "POC_MAX_BODY_BYTES" in answer.json()["detail"]


async def test_a_client_that_leaves_cancels_its_job_at_the_owner(tmp_path: Path) -> None:
    async with two(tmp_path) as (owner, other), client(other) as http:
        owner.engine.latency_s = 60.0
        asking = asyncio.create_task(http.post("/generate", json={**JOB, "wait": True}))
        await until(lambda: owner.engine.leases == 1)
        asking.cancel()
        await until(lambda: owner.engine.leases == 0)
        owner.engine.latency_s = 0.0


async def test_queries_and_error_bodies_pass_unchanged(tmp_path: Path) -> None:
    async with two(tmp_path) as (owner, other), client(owner) as one, client(other) as two_:
        paths = ("/results?after=3&limit=2", "/results?limit=0", "/generate/%2e%2e", "/metrics")
        for path in paths:
            here, there = await one.get(path), await two_.get(path)
            assert here.status_code == there.status_code
            if path != "/metrics":
                assert here.content == there.content
            assert here.headers["content-type"] == there.headers["content-type"]
        named = await two_.get("/status", headers={"X-Request-Id": "mine"})
        assert named.headers.get_list("x-request-id") == ["mine"]


async def test_processes_of_one_parent_belong_to_one_server() -> None:
    ask = "from proofserve.wiring.owner import this_server; print(this_server())"
    named = []
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ask, stdout=asyncio.subprocess.PIPE
        )
        named.append((await process.communicate())[0])
    assert named[0] == named[1] != b""
    assert named[0].decode().strip() != address.this_server()
    assert named[0].startswith(f"{os.getpid()}-".encode())
