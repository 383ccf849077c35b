"""Rounds over HTTP: start, status, results, stop."""

import asyncio
from typing import Any

import pytest

from api.support import GENERATE, JOB, ORDER, START, STOP, Server, serving
from proofserve.protocol.codec import decode
from proofserve.rounds.computation import NOT_FINITE
from support.pace import until

pytestmark = pytest.mark.anyio

STARTED = {"status": "OK", "pow_status": {"status": "GENERATING"}}
STOPPED = {"status": "OK", "pow_status": {"status": "STOPPED"}}


async def test_an_idle_node_shows_that_it_is_idle(server: Server) -> None:
    body = await server.status()
    assert (body["status"], body["config"], body["stats"]) == ("IDLE", None, None)
    assert body["scheme"] == "artifact-v1"
    assert body["queue"] == {"queued_nonces": 0, "limit": 100}
    assert body["outbox"]["results"] == 0
    assert body["engine"]["forwards"] == 0
    assert body["engine_error"] is None


async def test_a_round_from_start_to_stop(server: Server) -> None:
    response = await server.post(START, {**ORDER, "group_id": 1, "n_groups": 2, "batch_size": 8})
    assert (response.status_code, response.json()) == (200, STARTED)
    await until(lambda: len(server.outbox.rows) >= 16)
    body = await server.status()
    assert body["status"] == "GENERATING"
    assert body["config"] == {
        "block_hash": "block",
        "block_height": 7,
        "public_key": "key",
        "node_id": 1,
        "node_count": 3,
        "group_id": 1,
        "n_groups": 2,
        "seq_len": 16,
        "k_dim": 12,
        "scheme": "artifact-v1",
        "commit": "vectors",
    }
    assert body["stats"]["total_processed"] >= 16
    assert body["stats"]["nonces_per_second"] > 0
    response = await server.post(STOP)
    assert (response.status_code, response.json()) == (200, STOPPED)
    stopped = await server.status()
    assert stopped["status"] == "STOPPED"
    assert stopped["config"] == body["config"]
    assert stopped["stats"]["total_processed"] == len(server.outbox.rows)
    # Node 1 of 3, group 1 of 2: its own third of its own half, in order.
    assert server.outbox.nonces == [4 + 6 * x for x in range(len(server.outbox.rows))]
    assert all(len(call) == 8 for call in server.engine.calls)


async def test_stop_always_has_the_same_answer(server: Server) -> None:
    for _ in range(2):
        response = await server.post(STOP)
        assert response.status_code == 200
        assert STOPPED["pow_status"].items() <= response.json()["pow_status"].items()
    assert (await server.status())["status"] == "STOPPED"


async def test_the_default_batch_size_is_that_of_the_deployment() -> None:
    async with serving(default_batch_size=5) as server:
        await server.post(START, ORDER)
        await server.post(GENERATE, JOB)
        await until(lambda: server.engine.calls)
        assert len(server.engine.calls[0]) == 5


async def test_results_are_read_page_by_page(server: Server) -> None:
    server.engine.not_finite = frozenset({4})
    await server.post(START, ORDER)
    await until(lambda: len(server.outbox.rows) >= 70)
    await server.post(STOP)
    total, after, rows = len(server.outbox.rows), 0, list[dict[str, Any]]()
    while page := (await server.get(f"/results?after={after}&limit=30")).json()["results"]:
        assert len(page) <= 30
        rows += page
        after = page[-1]["seq"]
    assert [row["seq"] for row in rows] == list(range(1, total + 1))
    assert sorted(row["nonce"] for row in rows) == [1 + 3 * x for x in range(total)]
    assert len({row["round_id"] for row in rows}) == 1
    errors = [row for row in rows if "error" in row]
    assert [(row["nonce"], row["error"]) for row in errors] == [(4, NOT_FINITE)]
    assert all(len(decode(row["vector_b64"], 12)) == 12 for row in rows if "error" not in row)
    end = (await server.get(f"/results?after={total}")).json()
    assert end == {"results": [], "next_after": total}
    assert (await server.get("/results?limit=2")).json()["next_after"] == 2


async def test_the_status_of_a_paused_round(server: Server) -> None:
    await server.post(START, ORDER)
    server.outbox.full = "disk full"
    await until(lambda: server.node.manager.status().paused_reason)
    body = await server.status()
    assert body["status"] == "GENERATING"
    assert body["paused_reason"] == "outbox: disk full"
    assert (body["outbox"], body["outbox_error"]) == (None, "disk full")
    server.outbox.full = None
    before = len(server.outbox.rows)
    await until(lambda: len(server.outbox.rows) > before)
    assert (await server.status())["paused_reason"] is None
    await server.post(STOP)
    assert server.outbox.nonces == [1 + 3 * x for x in range(len(server.outbox.rows))]


async def test_the_status_shows_that_the_engine_is_dead(server: Server) -> None:
    await server.post(START, ORDER)
    server.engine.gone = True
    await until(lambda: server.node.manager.status().error)
    body = await server.status()
    assert body["status"] == "STOPPED"
    assert body["error"] == "the toy engine is dead"
    assert body["engine"] is None
    assert body["engine_error"] == "the toy engine is dead"
    assert (await server.post(STOP)).json() == STOPPED
    assert server.outbox.closed == server.outbox.open


async def test_the_status_shows_why_a_faulty_round_ended(server: Server) -> None:
    server.engine.faults = 10**9
    await server.post(START, ORDER)
    await until(lambda: server.node.manager.status().error)
    body = await server.status()
    assert body["status"] == "STOPPED"
    assert body["error"] == "3 faults in a row, the last one: the toy engine was told to fail"
    assert body["stats"]["faults"] >= 3
    server.engine.faults = 0
    assert (await server.post(START, ORDER)).status_code == 200


async def test_a_round_stopped_while_deferred_never_runs_afterwards(server: Server) -> None:
    server.engine.deferrals, server.engine.deferral_s = 10**9, 60
    await server.post(START, ORDER)
    await until(lambda: server.engine.calls)
    assert (await server.post(STOP)).json() == STOPPED
    server.engine.deferrals = 0
    calls = len(server.engine.calls)
    await asyncio.sleep(0.05)
    assert len(server.engine.calls) == calls
    assert server.outbox.rows == []


async def test_versions(server: Server) -> None:
    body = (await server.get("/versions")).json()
    assert body["vllm_version"] == "none"
    assert body["poc_validation_inference"] is True


async def test_the_examples_in_the_api_description_run() -> None:
    async with serving(scheme=None) as server:
        schemas = server.app.openapi()["components"]["schemas"]
        for example in schemas["RoundRequest"]["examples"]:
            response = await server.post(START, example)
            assert (response.status_code, response.json()) == (200, STARTED)
            await server.post(STOP)
        for example in schemas["JobRequest"]["examples"]:
            response = await server.post(GENERATE, example)
            assert response.status_code == 200, response.text
