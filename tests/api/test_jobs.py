"""Jobs over HTTP: queued or awaited, with claims or without."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from api.support import GENERATE, JOB, ORDER, START, STOP, Server, serving
from proofserve.protocol.codec import decode
from proofserve.rounds.computation import NOT_FINITE
from rounds.doubles import QUICK
from support.pace import until

pytestmark = pytest.mark.anyio

ENCODING = {"dtype": "f16", "k_dim": 12, "endian": "le"}
WAIT = {**JOB, "wait": True}
ABOUT = {name: JOB[name] for name in ("block_hash", "block_height", "public_key")}


async def proofs(server: Server, *nonces: int) -> list[dict[str, Any]]:
    response = await server.post(GENERATE, {**WAIT, "nonces": list(nonces)})
    assert response.status_code == 200, response.text
    artifacts: list[dict[str, Any]] = response.json()["artifacts"]
    return artifacts


def claiming(artifacts: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    nonces = sorted({artifact["nonce"] for artifact in artifacts})
    return {**WAIT, "nonces": nonces, "validation": {"artifacts": artifacts}, **more}


async def test_a_job_with_wait_answers_with_its_artifacts(server: Server) -> None:
    body = (await server.post(GENERATE, {**WAIT, "url": "http://x"})).json()
    assert set(body) == {"status", "request_id", *ABOUT, "artifacts", "encoding"}
    assert {name: body[name] for name in ABOUT} == ABOUT
    assert (body["status"], body["encoding"]) == ("completed", ENCODING)
    assert [a["nonce"] for a in body["artifacts"]] == JOB["nonces"]
    assert all(len(decode(a["vector_b64"], 12)) == 12 for a in body["artifacts"])
    # A job with ``wait`` sends no callback.
    assert server.outbox.callbacks == []


async def test_a_queued_job_gives_its_artifacts_later(server: Server) -> None:
    answer = (await server.post(GENERATE, {**JOB, "url": "http://x/cb"})).json()
    assert answer == {"status": "queued", "request_id": answer["request_id"], "queued_count": 4}
    body = await server.ended(answer["request_id"])
    artifacts = await proofs(server, *JOB["nonces"])
    assert body == {
        "status": "completed",
        "request_id": answer["request_id"],
        **ABOUT,
        "artifacts": artifacts,
        "encoding": ENCODING,
    }
    assert server.outbox.callbacks == [
        (
            "generated",
            "http://x/cb",
            {
                "request_id": answer["request_id"],
                "block_hash": "block",
                "block_height": 7,
                "public_key": "key",
                "node_id": 1,
                "artifacts": artifacts,
                "encoding": ENCODING,
            },
        )
    ]


async def test_a_round_and_a_job_compute_the_same_vector_for_a_nonce(server: Server) -> None:
    await server.post(START, ORDER)
    await until(lambda: len(server.outbox.rows) >= 8)
    await server.post(STOP)
    rows = server.outbox.rows[:8]
    artifacts = await proofs(server, *(row.nonce for row in rows))
    assert [a["vector_b64"] for a in artifacts] == [row.value for row in rows]


async def test_honest_claims_get_an_honest_verdict(server: Server) -> None:
    artifacts = await proofs(server, 1, 2, 3)
    body = (await server.post(GENERATE, claiming(artifacts))).json()
    assert body == {
        "status": "completed",
        "request_id": body["request_id"],
        **ABOUT,
        "n_total": 3,
        "n_mismatch": 0,
        "mismatch_nonces": [],
        "p_value": 1.0,
        "fraud_detected": False,
    }


@pytest.mark.parametrize("text", ["", "AAAA", "A" * 31, "A" * 64, "?" * 32, "AH4A" * 8, "A" * 32])
@pytest.mark.parametrize("wait", [True, False])
async def test_a_claim_that_is_not_a_vector_is_a_mismatch(
    server: Server, text: str, wait: bool
) -> None:
    artifacts = await proofs(server, 1, 2, 3)
    forged = [{"nonce": 2, "vector_b64": text}, artifacts[0], artifacts[2]]
    answer = (await server.post(GENERATE, claiming(forged, wait=wait))).json()
    body = answer if wait else await server.ended(answer["request_id"])
    assert (body["n_total"], body["n_mismatch"], body["mismatch_nonces"]) == (3, 1, [2])
    assert body["p_value"] == pytest.approx(1 - 0.999**3)
    assert body["fraud_detected"] is True


async def test_two_claims_about_one_nonce_are_a_mismatch(server: Server) -> None:
    artifacts = await proofs(server, 1, 2)
    body = (await server.post(GENERATE, claiming([*artifacts, artifacts[0]]))).json()
    assert body["mismatch_nonces"] == [1]


@pytest.mark.parametrize(
    ("test", "fraud"),
    [
        (None, True),
        ({}, True),
        ({"p_mismatch": 0.5}, False),
        ({"p_mismatch": 0.005, "fraud_threshold": 0.001}, False),
        ({"p_mismatch": 0.005, "p_value_threshold": 0.001}, False),
        ({"p_mismatch": 0.005, "p_value_threshold": 0.1, "fraud_threshold": 0.1}, True),
        ({"dist_threshold": 2}, False),
    ],
)
async def test_the_thresholds_of_the_request_are_used(
    server: Server, test: dict[str, float] | None, fraud: bool
) -> None:
    artifacts = await proofs(server, 1, 2, 3)
    artifacts[1]["vector_b64"] = artifacts[0]["vector_b64"]
    body = (await server.post(GENERATE, claiming(artifacts, stat_test=test))).json()
    assert body["fraud_detected"] is fraud


async def test_during_a_round_jobs_wait_and_are_not_refused(server: Server) -> None:
    await server.post(START, ORDER)
    awaited = asyncio.create_task(server.post(GENERATE, {**WAIT, "nonces": [10**6]}))
    queued = (await server.post(GENERATE, JOB)).json()
    await asyncio.sleep(0.05)
    assert not awaited.done()
    body = (await server.get(f"/generate/{queued['request_id']}")).json()
    assert body == {"status": "queued", "request_id": queued["request_id"]}
    assert (await server.status())["queue"]["queued_nonces"] == 5
    await server.post(STOP)
    response = await awaited
    assert response.status_code == 200
    assert [a["nonce"] for a in response.json()["artifacts"]] == [10**6]
    # A stop cancels the queued jobs and reports them.
    assert (await server.ended(queued["request_id"]))["status"] == "cancelled"


async def test_stopping_keeps_the_results_of_completed_jobs(server: Server) -> None:
    queued = (await server.post(GENERATE, JOB)).json()
    await server.ended(queued["request_id"])
    await server.post(STOP)
    assert (await server.ended(queued["request_id"]))["status"] == "completed"


async def test_jobs_are_served_in_their_order(server: Server) -> None:
    await server.post(START, ORDER)
    pending: list[asyncio.Task[Any]] = []
    for nonce in range(6):
        order = {**WAIT, "nonces": [nonce]}
        pending.append(asyncio.create_task(server.post(GENERATE, order)))
        await until(lambda: server.node.manager.status().queue.queued_nonces == len(pending))
    await server.post(STOP)
    assert {(await task).status_code for task in pending} == {200}
    assert server.engine.calls[-6:] == [(nonce,) for nonce in range(6)]


async def test_results_expire() -> None:
    quick = replace(QUICK, result_ttl_s=0.5)
    async with serving(quick) as server:
        queued = (await server.post(GENERATE, JOB)).json()
        path = f"/generate/{queued['request_id']}"
        for _ in range(1000):
            response = await server.get(path)
            if response.status_code == 404:
                break
            await asyncio.sleep(0.01)
        assert response.status_code == 404
        assert response.json() == {"detail": f"Request {queued['request_id']} not found"}


async def test_an_engine_fault_is_503_or_a_failed_job_and_no_verdict(server: Server) -> None:
    artifacts = await proofs(server, 1, 2)
    for wait in (True, False):
        server.engine.faults = 1
        response = await server.post(GENERATE, claiming(artifacts, wait=wait, url="http://x"))
        if wait:
            assert response.status_code == 503
            assert response.json() == {"detail": "the toy engine was told to fail"}
        else:
            body = await server.ended(response.json()["request_id"])
            assert body == {
                "status": "failed",
                "request_id": body["request_id"],
                "error": "the toy engine was told to fail",
            }
    assert server.outbox.callbacks == []


@pytest.mark.parametrize("broken", ["not_finite", "dropped"])
async def test_an_incomplete_recomputation_is_an_error(server: Server, broken: str) -> None:
    artifacts = await proofs(server, 1, 2)
    setattr(server.engine, broken, frozenset({2}))
    response = await server.post(GENERATE, claiming(artifacts))
    assert response.status_code == 503
    answer = (await server.post(GENERATE, claiming(artifacts, wait=False))).json()
    body = await server.ended(answer["request_id"])
    assert body["status"] == "failed"
    assert "fraud_detected" not in body


async def test_a_nonce_without_an_artifact_is_named(server: Server) -> None:
    server.engine.not_finite = frozenset({2})
    body = (await server.post(GENERATE, WAIT)).json()
    assert [a["nonce"] for a in body["artifacts"]] == [1, 3, 4]
    assert body["failed"] == [{"nonce": 2, "error": NOT_FINITE}]


async def test_a_job_is_503_if_chat_does_not_end() -> None:
    impatient = replace(QUICK, chunk_timeout_s=0.3)
    async with serving(impatient) as server:
        server.engine.deferrals, server.engine.deferral_s = 10**9, 0.1
        response = await server.post(GENERATE, WAIT)
    assert response.status_code == 503
    assert response.json()["detail"].startswith("skipped")


async def test_a_job_is_503_if_the_engine_dies_meanwhile(server: Server) -> None:
    server.engine.latency_s = 0.05
    waiting = asyncio.create_task(server.post(GENERATE, WAIT))
    await until(lambda: server.engine.calls)
    server.engine.gone = True
    response = await waiting
    assert (response.status_code, response.json()) == (503, {"detail": "Engine not available"})


async def test_without_claims_the_thresholds_have_no_effect(server: Server) -> None:
    response = await server.post(GENERATE, {**WAIT, "stat_test": {"dist_threshold": 0.1}})
    assert "artifacts" in response.json()


async def test_a_full_callback_queue_refuses_more_callbacks() -> None:
    async with serving(max_callbacks=1) as server:
        first = (await server.post(GENERATE, {**JOB, "url": "http://x"})).json()
        await server.ended(first["request_id"])
        refused = await server.post(GENERATE, {**JOB, "url": "http://x"})
        assert refused.status_code == 429
        assert refused.json() == {"detail": "Callback queue full: 1 callbacks wait, limit is 1"}
        assert (await server.post(GENERATE, JOB)).status_code == 200
