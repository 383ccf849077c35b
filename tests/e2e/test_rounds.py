"""Rounds, jobs and validation on a real server, over real HTTP, with chat beside them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from proofserve.cli.main import app
from support.four_bits import one_thread
from support.models import TINY_THRESHOLD, SmallModels
from support.node import ROUND, ServedNode, until

pytestmark = pytest.mark.engine


def validate(node: ServedNode, artifacts: list[Any], **changes: Any) -> Any:
    nonces = [artifact["nonce"] for artifact in artifacts]
    return node.prove(nonces, validation={"artifacts": artifacts}, **changes)


def test_a_round_proves_in_the_gaps_that_chat_leaves(node: ServedNode) -> None:
    before = node.chat("Tell me about rivers.")
    free = node.free_blocks()
    first = len(node.results())
    node.start_round()
    until(lambda: node.processed() >= 32)
    assert node.status()["status"] == "GENERATING"
    assert node.chat("Tell me about rivers.") == before
    done = node.processed()
    until(lambda: node.processed() > done)
    node.stop()
    status = node.status()
    assert status["status"] == "STOPPED"
    assert status["engine"]["free_blocks"] == free
    assert status["engine"]["longest_chat_wait_batches"] <= 1.05
    rows = node.results()[first:]
    assert len(rows) == status["stats"]["total_processed"]
    assert [row["nonce"] for row in rows] == list(range(len(rows)))


def test_a_second_round_is_refused_and_changes_nothing(node: ServedNode) -> None:
    node.start_round()
    refused = node.request("POST", "/init/generate", {**ROUND, "public_key": "another"})
    assert refused.status_code == 409
    assert refused.json() == {"detail": "Already generating"}
    assert node.status()["config"]["public_key"] == "node-key"


def test_a_job_waits_for_the_round_and_then_completes(node: ServedNode) -> None:
    node.start_round()
    queued = node.call("POST", "/generate", {**ROUND, "nonces": [1, 2, 3]})
    assert queued["status"] == "queued"
    until(lambda: node.processed() >= 32)
    path = f"/generate/{queued['request_id']}"
    assert node.call("GET", path)["status"] == "queued"


def test_a_job_without_a_round_completes(node: ServedNode) -> None:
    queued = node.call("POST", "/generate", {**ROUND, "nonces": [1, 2, 3]})
    path = f"/generate/{queued['request_id']}"
    until(lambda: node.call("GET", path)["status"] == "completed")
    done = node.call("GET", path)
    assert [artifact["nonce"] for artifact in done["artifacts"]] == [1, 2, 3]
    assert done["encoding"] == {"dtype": "f16", "k_dim": 12, "endian": "le"}


def test_own_artifacts_are_honest(node: ServedNode) -> None:
    artifacts = node.prove(list(range(20)))["artifacts"]
    verdict = validate(node, artifacts)
    assert (verdict["n_total"], verdict["n_mismatch"]) == (20, 0)
    assert verdict["p_value"] == 1.0
    assert verdict["fraud_detected"] is False


@pytest.mark.parametrize("changed", [{"public_key": "another"}, {"block_hash": "0xdef"}])
def test_another_key_or_block_is_fraud(node: ServedNode, changed: dict[str, str]) -> None:
    artifacts = node.prove(list(range(20)))["artifacts"]
    verdict = validate(node, artifacts, **changed)
    assert verdict["n_mismatch"] == 20
    assert verdict["fraud_detected"] is True


@pytest.mark.parametrize("claim", ["", "AAAA", "not base64!", "/38AAAAAAAAAAAAAAAAAAAAAAAAAAAAA"])
def test_claims_without_a_vector_are_mismatches(node: ServedNode, claim: str) -> None:
    artifacts = node.prove(list(range(20)))["artifacts"]
    forged = [{**artifact, "vector_b64": claim} for artifact in artifacts[:3]] + artifacts[3:]
    verdict = validate(node, forged)
    assert verdict["mismatch_nonces"] == [0, 1, 2]
    assert verdict["fraud_detected"] is True


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    nonces=st.lists(st.integers(0, 39), min_size=1, max_size=40, unique=True),
    batch_size=st.integers(3, 64),
)
def test_a_vector_is_the_same_in_any_request(
    node: ServedNode, nonces: list[int], batch_size: int
) -> None:
    known = {a["nonce"]: a["vector_b64"] for a in node.prove(list(range(40)))["artifacts"]}
    got = node.prove(nonces, batch_size=batch_size)["artifacts"]
    assert got == [{"nonce": nonce, "vector_b64": known[nonce]} for nonce in nonces]


def test_the_openapi_schema_describes_the_routes(node: ServedNode) -> None:
    schema = node._http.get("/openapi.json").json()
    for path in ("/init/generate", "/generate", "/generate/{request_id}", "/status", "/stop"):
        assert f"/api/v1/pow{path}" in schema["paths"]


def test_a_validator_verifies_a_round_without_vllm(
    node: ServedNode, tiny: Path, small_models: SmallModels
) -> None:
    node.start_round()
    until(lambda: node.processed() >= 64)
    node.stop()
    # The node says which checkpoint it serves, so by another one it has not proved.
    for model, verdict in ((tiny, 0), (small_models.get("qwen3", seed=1), 2)):
        options = ("--model", str(model), "--dist-threshold", TINY_THRESHOLD)
        outcome = CliRunner().invoke(app, ["verify", node.server.url, *options])
        assert outcome.exit_code == verdict, outcome.output
    assert "weights_digest: the source has" in outcome.output
    assert node.chat("Chat goes on.")


@pytest.mark.usefixtures("few_kernels")
def test_the_noise_of_a_node_is_far_below_a_threshold_for_frauds(
    node: ServedNode, tiny: Path, tmp_path: Path
) -> None:
    figures = tmp_path / "noise.json"
    few = ("--nonces", "48", "--emulated", "16", "--bank", "0", "--seq-len", "16")
    engine = ("--other", node.server.url, "--json", str(figures))
    with one_thread():
        outcome = CliRunner().invoke(
            app, ["calibrate", "noise", str(tiny), *engine, *few, "--verifications", "100"]
        )
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(figures.read_text())
    measured = [each for each in found["populations"] if not each["facts"]["emulated"]]
    assert len(measured) == 1
    # The node says on what it runs.
    assert measured[0]["facts"]["engine"].startswith("vLLM 0.")
    assert measured[0]["facts"]["dtype"] in {"bfloat16", "float32"}
    assert 0 < found["dist_threshold"] <= float(TINY_THRESHOLD)
