"""Other refusals: their status, and a message that names the fault."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

import proofserve
from api.distance_bodies import ROUND as DISTANCE
from api.support import (
    GENERATE,
    JOB,
    ORDER,
    RAW,
    START,
    STATUS,
    STOP,
    Server,
    changed,
    said,
    serving,
)
from proofserve.api.access import ApiError
from proofserve.outbox.allowlist import Allowlist, UrlCheck
from proofserve.protocol.nonces import MAX_NONCE

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", '"x"', '{"a":}', "\xff"])
@pytest.mark.parametrize("path", [START, GENERATE])
async def test_a_body_that_is_not_an_order_is_422(server: Server, path: str, text: str) -> None:
    response = await server.client.post(path, content=text.encode("latin-1"), headers=RAW)
    assert response.status_code in (400, 422)
    assert "detail" in response.json()


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":' + b"9" * 5000 + b"}",
        b"[" * 1000,
        json.dumps(ORDER).encode("utf-16"),
        b"\xef\xbb\xbf" + json.dumps(ORDER).encode(),
        b'{"\\ud800": ' + b"9" * 5000 + b"}",
        b'{"\\ud800": ' + b"[" * 1000,
        b'{"a": "\xed\xa0\x80"}',
        gzip.compress(json.dumps(ORDER).encode()),
    ],
)
async def test_a_body_that_is_not_standard_json_is_422(server: Server, body: bytes) -> None:
    response = await server.client.post(START, content=body, headers=RAW)
    assert response.status_code == 422
    assert "body.0: JSON decode error: " in said(response)
    assert " at line 1 column " in said(response)


async def test_a_key_of_half_a_surrogate_pair_is_refused_as_unknown(server: Server) -> None:
    response = await server.client.post(START, content=b'{"\\ud800": 1}', headers=RAW)
    assert response.status_code == 422


async def test_a_refusal_does_not_echo_the_input(server: Server) -> None:
    huge = {
        **JOB,
        "nonces": ["x" * 1000] * 1000,
        "k" * 100_000: 1,
        **{f"k{i}": 1 for i in range(99)},
    }
    response = await server.post(GENERATE, huge)
    assert response.status_code == 422
    assert len(response.json()["detail"]) == 20
    assert len(response.content) < 10_000


@pytest.mark.parametrize(
    ("deployed", "params"),
    [
        ({}, {"model": "other", "seq_len": 16, "k_dim": 12}),
        ({"seq_len": 64}, {"model": "toy", "seq_len": 16, "k_dim": 12}),
        ({"k_dim": 8, "seq_len": 16}, {"model": "toy", "seq_len": 16, "k_dim": 12}),
        # The deployment is checked before the model's own limits.
        ({"seq_len": 64}, {"model": "toy", "seq_len": 5000, "k_dim": 12}),
    ],
)
@pytest.mark.parametrize("path", [START, GENERATE])
async def test_params_other_than_the_deployed_ones_are_409(
    path: str, deployed: dict[str, Any], params: dict[str, Any]
) -> None:
    async with serving(**deployed) as server:
        response = await server.post(
            path, {**(JOB if path == GENERATE else ORDER), "params": params}
        )
        assert response.status_code == 409
        assert response.json() == {
            "detail": {
                "error": "params mismatch",
                "requested": params,
                "deployed": {
                    "model": ["toy"],
                    "seq_len": deployed.get("seq_len"),
                    "k_dim": deployed.get("k_dim"),
                },
            }
        }


@pytest.mark.parametrize("scheme", ["artifact-v1-layers", "distance-v1", "no-such-scheme"])
async def test_a_scheme_other_than_the_deployed_one_is_409(server: Server, scheme: str) -> None:
    response = await server.post(START, {**ORDER, "scheme": scheme})
    assert response.status_code == 409
    assert response.json()["detail"] == {
        "error": "scheme mismatch",
        "requested": {"scheme": scheme},
        "deployed": {"scheme": "artifact-v1"},
    }


async def test_a_lane_shorter_than_one_batch_is_422(server: Server) -> None:
    order = {**ORDER, "node_count": 2**31 - 1, "n_groups": 2**31 - 1, "batch_size": 4}
    response = await server.post(START, order)
    assert response.status_code == 422
    assert "body.node_count" in said(response)


@pytest.mark.parametrize("nonces", [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 5], []])
async def test_claims_about_other_nonces_are_400(server: Server, nonces: list[int]) -> None:
    artifacts = [{"nonce": nonce, "vector_b64": ""} for nonce in nonces]
    response = await server.post(GENERATE, {**JOB, "validation": {"artifacts": artifacts}})
    assert response.status_code == 400
    assert response.json() == {"detail": "validation.artifacts nonces must match nonces field"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (START, ORDER, "url"),
        (GENERATE, JOB, "url"),
        (START, DISTANCE, "callback_url"),
        ("/init", DISTANCE, "callback_url"),
        ("/init/validate", DISTANCE, "callback_url"),
    ],
)
async def test_a_forbidden_callback_url_is_422(path: str, body: dict[str, Any], field: str) -> None:
    async with serving(check_url=UrlCheck(Allowlist(["loopback"]))) as server:
        for url, words in (
            ("http://10.0.0.1:9000", "--poc-callback-allow"),
            ("http://169.254.169.254/latest", "--poc-callback-allow"),
            ("http://user:word@127.0.0.1:9000", "user name"),
        ):
            response = await server.post(path, {**body, field: url})
            assert response.status_code == 422
            assert f"body.{field}: " in said(response)
            assert words in said(response)
            assert "word@" not in response.text
        assert (await server.status())["status"] == "IDLE"
        response = await server.post(path, {**body, field: "http://127.0.0.1:9"})
        assert response.status_code == 200


async def test_a_second_round_is_409(server: Server) -> None:
    assert (await server.post(START, ORDER)).status_code == 200
    response = await server.post(START, ORDER)
    assert response.status_code == 409
    assert response.json() == {"detail": "Already generating"}


async def test_a_full_queue_is_429(server: Server) -> None:
    await server.post(START, ORDER)
    for _ in range(2):
        assert (await server.post(GENERATE, {**JOB, "nonces": list(range(45))})).status_code == 200
    for wait in (False, True):
        response = await server.post(GENERATE, {**JOB, "nonces": list(range(11)), "wait": wait})
        assert response.status_code == 429
        assert response.json() == {"detail": "Queue full: 90 nonces queued, limit is 100"}


async def test_an_unknown_job_is_404(server: Server) -> None:
    response = await server.get("/generate/no-such-id")
    assert response.status_code == 404
    assert response.json() == {"detail": "Request no-such-id not found"}


@pytest.mark.parametrize(
    "query", ["after=-1", "after=x", f"after={MAX_NONCE + 1}", "limit=0", "limit=10001", "limit=x"]
)
async def test_a_page_out_of_range_is_422(server: Server, query: str) -> None:
    response = await server.get(f"/results?{query}")
    assert response.status_code == 422
    assert f"query.{query.partition('=')[0]}" in said(response)


ALL_ROUTES = [
    ("POST", START),
    ("POST", GENERATE),
    ("GET", "/generate/x"),
    ("GET", STATUS),
    ("POST", STOP),
    ("GET", "/results"),
    ("GET", "/versions"),
]


@pytest.mark.parametrize(("method", "path"), ALL_ROUTES)
async def test_a_server_without_proofs_answers_503_to_everything(method: str, path: str) -> None:
    async with serving(enabled=False) as server:
        for body in (None, {"nonsense": 1}, JOB):
            response = await server.client.request(method, path, json=body)
            assert response.status_code == 503
            assert response.json() == {"detail": "PoC not enabled"}


@pytest.mark.parametrize(("path", "body"), [(START, ORDER), (GENERATE, JOB)])
async def test_a_dead_engine_is_503_after_the_params_were_checked(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    server.engine.gone = True
    response = await server.post(path, body)
    assert response.status_code == 503
    assert response.json() == {"detail": "Engine not available"}
    assert (await server.post(path, changed(body, "params.model", "x"))).status_code == 409
    assert (await server.status())["status"] == "IDLE"


async def test_a_round_that_the_outbox_cannot_store_is_503(server: Server) -> None:
    server.outbox.full = "disk full"
    for response in (await server.post(START, ORDER), await server.get("/results")):
        assert response.status_code == 503
        assert response.json() == {"detail": "disk full"}


async def test_the_deployed_scheme_can_have_the_stronger_rng() -> None:
    async with serving(scheme="artifact-v1-layers") as server:
        order = {**ORDER, "poc_stronger_rng": True, "scheme": "artifact-v1-layers"}
        assert (await server.post(START, order)).status_code == 200


async def test_an_unexpected_error_is_500_and_leaks_nothing(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async def results(after: int, limit: int) -> None:
        raise ZeroDivisionError("secret")

    server.outbox.results = results  # type: ignore[assignment, method-assign]
    response = await server.get("/results")
    assert response.status_code == 500
    assert response.json() == {"detail": "Internal server error"}
    assert "secret" in caplog.text


async def test_the_application_keeps_its_own_handlers(server: Server) -> None:
    assert (await server.client.get("http://node/elsewhere")).status_code == 418


def test_every_reason_in_the_sources_has_a_status() -> None:
    sources = Path(proofserve.__path__[0]).rglob("*.py")
    texts = [each.read_text("utf-8") for each in sources]
    reasons = {found for text in texts for found in re.findall(r'ApiError\(\s*"(\w+)"', text)}
    assert len(reasons) > 10
    for reason in reasons:
        assert ApiError(reason, "").status >= 400
