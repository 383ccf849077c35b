"""The distance protocol over HTTP, on a toy engine."""

import asyncio
from typing import Any

import pytest

from api.distance_bodies import (
    CLAIMS,
    INIT,
    INIT_VALIDATE,
    PHASE_GENERATE,
    PHASE_VALIDATE,
    ROUND,
    VALIDATE,
)
from api.support import GENERATE, JOB, ORDER, RAW, START, STOP, Server, changed, said, serving
from proofserve.protocol.nonces import MAX_NONCE, NonceLane
from support.pace import until

pytestmark = pytest.mark.anyio

LANE = NonceLane(1, 3)
# Another batch may add the 64 products of the projection in another order. In float32 a direction
# of length 1, and so a distance, is then wrong by 64 * sqrt(64) * 2^-24 at most, in both batches.
ROUNDING = 2 * 64 * 64**0.5 * 2**-24
ALL_WIN = {**ROUND, "r_target": 2.0}
FIELDS = {
    "state",
    "valid_nonces",
    "valid_distances",
    "total_checked",
    "total_valid",
    "elapsed_seconds",
    "rate_per_second",
    "r_target",
}


async def computed(server: Server, nonces: list[int], **changes: Any) -> dict[str, Any]:
    """The answer to claims about ``nonces`` that look honest."""
    body = {**CLAIMS, "nonces": nonces, "dist": [1.0] * len(nonces), **changes}
    response = await server.post(VALIDATE, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def winners(server: Server, at_least: int, **changes: Any) -> list[dict[str, Any]]:
    """The rows of a round that ran until it had winners."""
    assert (await server.post(START, {**ROUND, **changes})).status_code == 200
    await until(lambda: len(server.outbox.rows) >= at_least)
    assert (await server.post(STOP)).status_code == 200
    rows: list[dict[str, Any]] = (await server.get("/results")).json()["results"]
    return rows


async def test_init_then_generate(server: Server) -> None:
    response = await server.post(INIT, ROUND)
    assert response.json()["status"] == "OK"
    status = response.json()["pow_status"]
    assert set(status) == FIELDS
    assert (status["state"], status["r_target"], status["total_checked"]) == ("IDLE", 1.41, 0)
    response = await server.post(PHASE_GENERATE)
    assert response.json()["pow_status"]["state"] == "GENERATING"
    await until(lambda: server.outbox.rows)


async def test_a_round_stores_the_winners_and_counts_the_rest(server: Server) -> None:
    rows = await winners(server, 10)
    assert all(set(row) == {"seq", "round_id", "nonce", "dist"} for row in rows)
    assert all(row["dist"] < 1.41 for row in rows)
    status = await server.status()
    checked = status["total_checked"]
    assert status["state"] == "STOPPED"
    assert status["total_valid"] == len(rows) < checked
    assert checked % ROUND["batch_size"] == 0
    assert status["valid_nonces"] == [row["nonce"] for row in rows]
    assert status["valid_distances"] == [row["dist"] for row in rows]
    # The round computed every nonce of the lane: a nonce without a row does not win.
    looked_at = LANE.batch(0, min(checked, 48))
    answer = await computed(server, list(looked_at))
    pairs = zip(looked_at, answer["computed_distances"], strict=True)
    wins = {nonce: distance for nonce, distance in pairs if distance < 1.41}
    assert wins == {r["nonce"]: r["dist"] for r in rows if r["nonce"] <= looked_at[-1]}


async def test_status_shows_the_newest_winners_only(server: Server) -> None:
    rows = await winners(server, 150, r_target=2.0)
    status = await server.status()
    assert len(rows) > len(status["valid_nonces"]) == 100
    assert status["valid_nonces"] == [row["nonce"] for row in rows[-100:]]
    assert status["total_valid"] == len(rows)


async def test_a_stopped_round_continues_at_its_next_nonce(server: Server) -> None:
    before = await winners(server, 10, r_target=2.0)
    checked = (await server.status())["total_checked"]
    assert (await server.post(PHASE_GENERATE)).status_code == 200
    await until(lambda: len(server.outbox.rows) > len(before) + 20)
    await server.post(STOP)
    nonces = [row.nonce for row in server.outbox.rows]
    assert nonces == list(LANE.batch(0, len(nonces)))
    status = await server.status()
    assert status["total_checked"] == len(nonces) > checked


async def test_a_new_round_begins_at_the_first_nonce(server: Server) -> None:
    await winners(server, 10, r_target=2.0)
    response = await server.post(INIT, ROUND)
    status = response.json()["pow_status"]
    assert (status["state"], status["total_checked"], status["valid_nonces"]) == ("IDLE", 0, [])


async def test_validation_gives_the_statistics_of_the_batch(server: Server) -> None:
    rows = await winners(server, 20)
    body = {
        **CLAIMS,
        "nonces": [row["nonce"] for row in rows],
        "dist": [row["dist"] for row in rows],
    }
    answer = (await server.post(VALIDATE, body)).json()
    assert answer == {
        "status": "OK",
        "fraud_detected": False,
        "computed_distances": pytest.approx(body["dist"], abs=ROUNDING),
        "n_invalid": 0,
        "probability_honest": 1.0,
    }
    forged = {**body, "public_key": "another key"}
    answer = (await server.post(VALIDATE, forged)).json()
    assert answer["fraud_detected"]
    assert answer["n_invalid"] > 5
    assert answer["probability_honest"] < 1e-9


async def test_the_fraud_threshold_of_the_round_is_used(server: Server) -> None:
    # One invalid claim out of one has the probability of an honest node's error: 5e-4.
    for threshold, fraud in ((0.01, True), (1e-4, False)):
        await server.post(INIT, {**ROUND, "fraud_threshold": threshold, "r_target": 0.5})
        answer = await computed(server, [1], dist=[0.4])
        assert answer["probability_honest"] == pytest.approx(5e-4)
        assert answer["fraud_detected"] is fraud


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_a_distance_that_is_not_a_number_is_invalid(server: Server, value: str) -> None:
    await server.post(INIT_VALIDATE, {**ALL_WIN, "callback_url": "http://x"})
    text = (
        '{"public_key":"key","block_hash":"block","block_height":7,"node_id":0,'
        f'"nonces":[1,4],"dist":[1.0,{value}]}}'
    )
    response = await server.client.post(VALIDATE, content=text, headers=RAW)
    assert response.status_code == 200
    assert response.json()["n_invalid"] == 1
    assert response.json()["fraud_detected"]
    (_, _, pushed) = server.outbox.callbacks[0]
    assert pushed["received_distances"] == [1.0, None]
    assert pushed["valid"] == [True, False]


async def test_a_verdict_is_pushed_while_validating_only(server: Server) -> None:
    with_url = {**ROUND, "callback_url": "http://here/cb"}
    await server.post(INIT, with_url)
    await computed(server, [1, 4])
    assert server.outbox.callbacks == []
    await server.post(PHASE_VALIDATE)
    answer = await computed(server, [1, 4], dist=[0.3, 0.4])
    ((endpoint, url, body),) = server.outbox.callbacks
    assert (endpoint, url) == ("validated", "http://here/cb")
    assert body == {
        "nonces": [1, 4],
        "computed_distances": answer["computed_distances"],
        "received_distances": [0.3, 0.4],
        "valid": [d <= 1.41 for d in answer["computed_distances"]],
        "fraud_detected": answer["fraud_detected"],
        "n_invalid": answer["n_invalid"],
        "probability_honest": answer["probability_honest"],
        "r_target": ROUND["r_target"],
        "fraud_threshold": 0.01,
        "public_key": "key",
        "node_id": CLAIMS["node_id"],
        "block_hash": "block",
        "block_height": 7,
    }


async def test_a_verdict_that_cannot_be_pushed_gives_an_error(server: Server) -> None:
    await server.post(INIT_VALIDATE, {**ROUND, "callback_url": "http://x"})
    server.outbox.full = "disk full"
    response = await server.post(VALIDATE, CLAIMS)
    assert response.status_code == 503
    server.outbox.full = None
    assert (await server.status())["total_checked"] == 0


async def test_any_number_of_nonces_is_split_into_calls(server: Server) -> None:
    await server.post(INIT, {**ROUND, "batch_size": 8})
    answer = await computed(server, list(range(50)))
    assert len(answer["computed_distances"]) == 50
    assert [len(call) for call in server.engine.calls] == [8] * 6 + [2]
    assert (await server.status())["total_checked"] == 50


async def test_validation_works_beside_a_running_round(server: Server) -> None:
    await server.post(START, ROUND)
    answer = await computed(server, [1, 4, 7])
    assert len(answer["computed_distances"]) == 3
    assert (await server.status())["state"] == "GENERATING"


async def test_a_nonce_that_cannot_be_recomputed_gives_an_error(server: Server) -> None:
    await server.post(INIT, ROUND)
    server.engine.not_finite = frozenset({4})
    response = await server.post(VALIDATE, CLAIMS)
    assert response.status_code == 503
    assert "nonce 4" in response.json()["detail"]


@pytest.mark.parametrize(("field", "value"), [("block_hash", "x"), ("block_height", 8)])
async def test_claims_about_another_block_are_409(server: Server, field: str, value: Any) -> None:
    await server.post(INIT, ROUND)
    response = await server.post(VALIDATE, {**CLAIMS, field: value})
    assert response.status_code == 409
    for part in (field, repr(value), repr(ROUND[field])):
        assert part in response.json()["detail"]
    assert server.engine.calls == []


@pytest.mark.parametrize("numbers", [{}, {"node_id": 0}, {"node_count": 3}])
async def test_a_round_without_a_lane_validates_and_does_not_generate(numbers: Any) -> None:
    body = {k: v for k, v in ROUND.items() if k not in ("node_id", "node_count")} | numbers
    async with serving() as server:
        response = await server.post(START, body)
        assert (response.status_code, response.json()["detail"]) == (
            400,
            "Node ID and node count must be set",
        )
        assert (await server.post(INIT_VALIDATE, body)).status_code == 200
        assert (await server.post(VALIDATE, CLAIMS)).status_code == 200
        response = await server.post(PHASE_GENERATE)
        assert (response.status_code, response.json()["detail"]) == (
            400,
            "Node ID and node count must be set",
        )
        assert (await server.status())["state"] == "VALIDATING"


BAD_ROUNDS: list[tuple[str, Any]] = [
    ("r_target", 0),
    ("r_target", 2.1),
    ("r_target", "1.4"),
    ("fraud_threshold", 0),
    ("fraud_threshold", 1),
    ("node_id", -2),
    ("node_id", 3),
    ("node_count", 0),
    ("group_id", 1),
    ("n_groups", 0),
    ("batch_size", 2),
    ("batch_size", 1025),
    ("seq_len", 0),
    ("seq_len", 513),
    ("callback_url", "ftp://x"),
    ("use_sign_flips", 1),
    ("use_layer_hooks", "yes"),
    ("block_height", -1),
    ("block_hash", ""),
    ("public_key", None),
    ("unknown", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD_ROUNDS)
@pytest.mark.parametrize("path", [INIT, START, INIT_VALIDATE])
async def test_an_invalid_number_is_422_and_named(path: str, field: str, value: Any) -> None:
    async with serving() as server:
        response = await server.post(path, changed(ROUND, field, value))
        assert response.status_code == 422, response.text
        assert f"body.{field}: " in said(response)
        assert (await server.status())["state"] == "IDLE"
        assert (await server.status())["config"] is None


BAD_CLAIMS: list[tuple[dict[str, Any], str]] = [
    ({"nonces": []}, "body.nonces: "),
    ({"nonces": [1, 4, 1]}, "body.nonces: "),
    ({"nonces": [1, 4, -7]}, "body.nonces.2: "),
    ({"nonces": [1, 4, MAX_NONCE + 1]}, "body.nonces.2: "),
    ({"nonces": [1, 4, True]}, "body.nonces.2: "),
    ({"nonces": list(range(51)), "dist": [1.0] * 51}, "body.nonces: "),
    ({"dist": [0.1]}, "dist has 1 values for 3 nonces"),
    ({"dist": [0.1, 0.2, "0.3"]}, "body.dist.2: "),
    ({"dist": [0.1, 0.2, None]}, "body.dist.2: "),
    ({"node_id": "a"}, "body.node_id: "),
    ({"extra": 1}, "body.extra: "),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CLAIMS)
async def test_invalid_claims_are_422_and_named(changes: dict[str, Any], message: str) -> None:
    async with serving() as server:
        await server.post(INIT, ROUND)
        response = await server.post(VALIDATE, {**CLAIMS, **changes})
        assert response.status_code == 422, response.text
        assert message in said(response)
        assert server.engine.calls == []


@pytest.mark.parametrize("field", sorted(CLAIMS))
async def test_every_field_of_claims_is_required(server: Server, field: str) -> None:
    await server.post(INIT, ROUND)
    response = await server.post(VALIDATE, {k: v for k, v in CLAIMS.items() if k != field})
    assert response.status_code == 422
    assert f"body.{field}: " in said(response)


async def test_the_body_selects_the_protocol(server: Server) -> None:
    for body in ({**ORDER, "r_target": 1.4}, {"block_hash": "block"}, []):
        response = await server.post(START, body)
        assert response.status_code == 422
        assert "exactly one of params (artifact protocol) and r_target" in said(response)
    response = await server.post(GENERATE, {**JOB, "r_target": 1.4})
    assert response.status_code == 422
    assert "no such call" in said(response)


async def test_a_seq_len_other_than_the_deployed_one_is_409() -> None:
    async with serving(seq_len=64) as server:
        for path in (INIT, START, INIT_VALIDATE):
            response = await server.post(path, ROUND)
            assert response.status_code == 409
            assert response.json()["detail"]["deployed"] == {"seq_len": 64}


async def test_jobs_wait_for_a_distance_round_and_not_for_validation(server: Server) -> None:
    await server.post(START, ROUND)
    waiting = asyncio.create_task(server.post(GENERATE, {**JOB, "wait": True}))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await server.post(PHASE_VALIDATE)
    assert (await waiting).json()["status"] == "completed"


async def test_a_dead_engine_is_503_for_every_call(server: Server) -> None:
    await server.post(INIT, ROUND)
    server.engine.gone = True
    for path, body in (
        (INIT, ROUND),
        (INIT_VALIDATE, ROUND),
        (START, ROUND),
        (PHASE_GENERATE, None),
        (PHASE_VALIDATE, None),
        (VALIDATE, CLAIMS),
    ):
        response = await server.post(path, body)
        assert (response.status_code, response.json()["detail"]) == (503, "Engine not available")
    assert (await server.status())["state"] == "IDLE"


@pytest.mark.parametrize(
    "path", [INIT, INIT_VALIDATE, START, PHASE_GENERATE, PHASE_VALIDATE, VALIDATE]
)
async def test_a_disabled_server_is_503(path: str) -> None:
    async with serving(enabled=False) as server:
        response = await server.post(path, {})
        assert (response.status_code, response.json()) == (503, {"detail": "PoC not enabled"})


async def test_the_examples_of_the_schema_run(server: Server) -> None:
    schema = (await server.client.get("http://node/openapi.json")).json()
    schemas = schema["components"]["schemas"]
    (round_example,) = schemas["DistanceRoundRequest"]["examples"]
    (claims_example,) = schemas["DistanceClaimsRequest"]["examples"]
    for path in (INIT, INIT_VALIDATE, START):
        assert (await server.post(path, round_example)).status_code == 200
    assert (await server.post(VALIDATE, claims_example)).status_code == 200
    body = schema["paths"]["/api/v1/pow/init/generate"]["post"]["requestBody"]
    content = body["content"]["application/json"]
    assert len(content["schema"]["anyOf" if "anyOf" in content["schema"] else "oneOf"]) == 2
    for example in content["examples"].values():
        await server.post(STOP)
        response = await server.post(START, example["value"])
        assert response.status_code == 200, response.text
