"""Every field of every body: invalid values are refused with the field's name in the message."""

import json
from typing import Any

import pytest

from api.support import GENERATE, JOB, ORDER, RAW, START, Server, changed, said

pytestmark = pytest.mark.anyio

NAN, INFINITY = float("nan"), float("inf")


def without(body: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != name}


WRONG_INTEGERS = [True, 1.0, 1.5, "1", None, [], {}, NAN, INFINITY]
COMMON = [
    *(("block_height", value) for value in [*WRONG_INTEGERS, -1, 2**63]),
    *(("node_id", value) for value in [*WRONG_INTEGERS, -1, 3, 2**31]),
    *(("node_count", value) for value in [*WRONG_INTEGERS, 0, -1, 2**31, 10**400]),
    *(("batch_size", value) for value in [True, 4.0, "4", [], 0, -3, 2, 1025]),
    *(("params.seq_len", value) for value in [*WRONG_INTEGERS, 0, -1, 513]),
    *(("params.k_dim", value) for value in [*WRONG_INTEGERS, 0, -1, 65]),
    *(("params.model", value) for value in [1, None, "", "m" * 1025]),
    *(("params.extra", value) for value in [1]),
    *(("block_hash", value) for value in [1, None, "", "b" * 1025, "\ud800"]),
    *(("public_key", value) for value in [1, None, "", "k" * 1025, "\ud800"]),
    *(("url", value) for value in [1, "", "ftp://x", "x", "http://", "http://x:y", "http://[x"]),
    *(("url", value) for value in ["http://x?a=b", "http://x/#a", "http://x/" + "a" * 2048]),
    *(("scheme", value) for value in [1, "", "s" * 1025]),
    *(("poc_stronger_rng", value) for value in [1, "true", None, True]),
    ("unknown_key", 1),
]
ROUND_ONLY = [
    *(("group_id", value) for value in [*WRONG_INTEGERS, -1, 1]),
    *(("n_groups", value) for value in [*WRONG_INTEGERS, 0, -1]),
]
CLAIM = {"nonce": 1, "vector_b64": ""}
JOB_ONLY = [
    *(("nonces", value) for value in [1, None, "1", [], [True], [1.0], ["1"], [-1], [2**63]]),
    *(("nonces", value) for value in [[1, 1], [None], list(range(51))]),
    *(("wait", value) for value in [1, "true", None]),
    *(("validation", value) for value in [1, [], {}]),
    *(("validation.artifacts", value) for value in [1, None, [1]]),
    *(
        ("validation.artifacts", [{**CLAIM, name: value}])
        for name, value in [("nonce", -1), ("nonce", "1"), ("vector_b64", 1), ("more", 1)]
    ),
    ("validation.artifacts", [{**CLAIM, "vector_b64": None}]),
    ("validation.artifacts", [{**CLAIM, "vector_b64": "A" * 65537}]),
    ("validation.artifacts", [{"nonce": 1}]),
    *(("stat_test.dist_threshold", value) for value in [True, "1", None, NAN, INFINITY, 0, -1, 3]),
    *(
        (f"stat_test.{name}", value)
        for name in ("p_mismatch", "fraud_threshold", "p_value_threshold")
        for value in [True, "1", NAN, INFINITY, 0, 1, -1, 10**400]
    ),
    ("stat_test.unknown_key", 1),
]
CASES = [
    pytest.param(path, body, field, value, id=f"{path} {field} {value!r:.30}")
    for path, body, changes in (
        (START, ORDER, COMMON + ROUND_ONLY),
        (GENERATE, JOB, COMMON + JOB_ONLY),
    )
    for field, value in changes
]


@pytest.mark.parametrize(("path", "body", "field", "value"), CASES)
async def test_a_value_out_of_range_is_422_and_named(
    server: Server, path: str, body: dict[str, Any], field: str, value: Any
) -> None:
    text = json.dumps(changed(body, field, value))
    response = await server.client.post(path, content=text, headers=RAW)
    assert response.status_code == 422
    assert f"body.{field}" in said(response)
    assert server.engine.calls == []
    assert (await server.status())["status"] == "IDLE"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [*((START, ORDER, field) for field in ORDER), *((GENERATE, JOB, field) for field in JOB)],
)
async def test_a_field_that_is_missing_is_422_and_named(
    server: Server, path: str, body: dict[str, Any], field: str
) -> None:
    response = await server.post(path, without(body, field))
    assert response.status_code == 422
    assert field in said(response)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({**JOB, "r_target": 1.4}, "which has no such call"),
        ({**without(JOB, "params"), "r_target": 1.4}, "which has no such call"),
        (without(JOB, "params"), "body.params: "),
    ],
)
async def test_jobs_are_of_the_artifact_protocol(
    server: Server, body: dict[str, Any], message: str
) -> None:
    response = await server.post(GENERATE, body)
    assert response.status_code == 422
    assert message in said(response)


async def test_two_different_thresholds_are_422(server: Server) -> None:
    test = {"fraud_threshold": 0.01, "p_value_threshold": 0.05}
    response = await server.post(GENERATE, {**JOB, "stat_test": test})
    assert response.status_code == 422
    assert "fraud_threshold and p_value_threshold" in said(response)
