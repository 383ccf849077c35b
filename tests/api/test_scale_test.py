"""Claims judged by the sizes of their distances: ``stat_test`` with ``test: scale``."""

import math
from typing import Any

import numpy as np
import pytest

from api.support import GENERATE, JOB, Server, changed, said
from proofserve.protocol.codec import decode, encode
from proofserve.protocol.verdict.scale import fitted

pytestmark = pytest.mark.anyio

HONEST = 0.01 * np.exp(np.random.default_rng(0).normal(0.0, 0.3, 1000))
FIT = fitted(HONEST)
CALIBRATION = {"s": FIT.s, "nu1": FIT.nu1, "nu2": FIT.nu2, "norms": list(FIT.norms)}
TEST: dict[str, Any] = {"test": "scale", "calibration": CALIBRATION}
BODY: dict[str, Any] = {**JOB, "nonces": list(range(20)), "wait": True}


async def moved(server: Server, distances: Any) -> list[dict[str, Any]]:
    """Claims whose vectors are ``distances`` from the node's own."""
    answer = (await server.post(GENERATE, BODY)).json()
    way = np.random.default_rng(1).normal(size=12)
    way /= np.linalg.norm(way)
    return [
        {**each, "vector_b64": encode((decode(each["vector_b64"], 12) + d * way)[np.newaxis])[0]}
        for each, d in zip(answer["artifacts"], distances, strict=True)
    ]


async def verdict(server: Server, artifacts: Any, **more: Any) -> dict[str, Any]:
    body = {**BODY, "validation": {"artifacts": artifacts}, "stat_test": {**TEST, **more}}
    response = await server.post(GENERATE, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_honest_distances_are_no_fraud(server: Server) -> None:
    answer = await verdict(server, await moved(server, HONEST[:20]))
    assert (answer["fraud_detected"], answer["n_total"], answer["n_mismatch"]) == (False, 20, 0)
    assert answer["p_value"] == 1.0


async def test_larger_distances_are_fraud_though_no_nonce_is_a_mismatch(server: Server) -> None:
    answer = await verdict(server, await moved(server, 4 * HONEST[:20]), fraud_threshold=1e-6)
    assert answer["fraud_detected"]
    assert answer["p_value"] <= 1e-6
    assert (answer["n_mismatch"], answer["mismatch_nonces"]) == (0, [])


async def test_the_threshold_of_a_distance_only_lists_nonces(server: Server) -> None:
    limit = float(np.median(HONEST[:20]))
    artifacts = await moved(server, HONEST[:20])
    answer = await verdict(server, artifacts, dist_threshold=limit)
    assert 8 <= answer["n_mismatch"] <= 12
    assert answer["p_value"] == (await verdict(server, artifacts))["p_value"]
    assert not answer["fraud_detected"]


async def test_a_claim_without_a_vector_counts_as_infinitely_far(server: Server) -> None:
    artifacts = await moved(server, HONEST[:20])
    for broken in (0, 1, 2):
        artifacts[broken] = {**artifacts[broken], "vector_b64": "AAAA"}
    answer = await verdict(server, artifacts)
    assert answer["fraud_detected"]
    assert answer["mismatch_nonces"] == [0, 1, 2]


async def test_the_verdict_is_fraud_from_the_threshold_on(server: Server) -> None:
    artifacts = await moved(server, 2.5 * HONEST[:20])
    p_value = (await verdict(server, artifacts))["p_value"]
    assert 0 < p_value < 0.5
    assert (await verdict(server, artifacts, fraud_threshold=p_value * 1.001))["fraud_detected"]
    below = await verdict(server, artifacts, fraud_threshold=p_value * 0.999)
    assert not below["fraud_detected"]


WRONG = [
    *(("calibration.s", value) for value in [0, -1, "1", None, 1e5, 1e-10]),
    *((f"calibration.{name}", value) for name in ("nu1", "nu2") for value in [0, -1, "1", 1e5]),
    *(("calibration.norms", value) for value in [1, [], [1, 1, 1], [1] * 5, [1, 1, 1, 0.9]]),
    ("calibration.more", 1),
    *((name, value) for name in ("dist_threshold", "fraud_threshold") for value in [0, "1", 3]),
    ("test", "rank"),
    ("calibration", None),
    ("p_mismatch", 0.1),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
async def test_a_wrong_field_is_422_and_named(server: Server, field: str, value: Any) -> None:
    response = await server.post(GENERATE, {**BODY, "stat_test": changed(TEST, field, value)})
    assert response.status_code == 422
    assert "body.stat_test" in said(response)
    assert field.rpartition(".")[2] in said(response)
    assert server.engine.calls == []


@pytest.mark.parametrize("name", [*CALIBRATION])
async def test_a_calibration_without_a_field_is_422(server: Server, name: str) -> None:
    some = {key: value for key, value in CALIBRATION.items() if key != name}
    response = await server.post(GENERATE, {**BODY, "stat_test": {**TEST, "calibration": some}})
    assert response.status_code == 422
    assert f"body.stat_test.calibration.{name}: " in said(response)


async def test_a_calibration_of_the_count_test_is_422(server: Server) -> None:
    response = await server.post(GENERATE, {**BODY, "stat_test": {"calibration": CALIBRATION}})
    assert response.status_code == 422
    assert "calibration is needed for the test scale" in said(response)


@pytest.mark.parametrize("extreme", [1e-9, 1e4])
async def test_no_calibration_breaks_the_evidence(server: Server, extreme: float) -> None:
    odd = {"s": extreme, "nu1": 1e4, "nu2": 1e4, "norms": [1.0, 1.0, 1.0, 1.0]}
    artifacts = await moved(server, HONEST[:20])
    artifacts[0] = {**artifacts[0], "vector_b64": ""}
    answer = await verdict(server, artifacts, calibration=odd)
    assert math.isfinite(answer["p_value"])
