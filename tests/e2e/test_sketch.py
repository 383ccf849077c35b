"""sketch-v1 on a real server, beside the network's scheme and beside chat."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.cli.recompute import by_node
from proofserve.engines.checkpoints import weights_digest
from proofserve.protocol.codec import decode
from proofserve.protocol.identity import Block
from proofserve.protocol.schemes import scheme
from proofserve.remote.node_client import NodeClient, Transcript
from proofserve.remote.records import Work
from proofserve.rounds.records import Workload
from support.node import NAME, PARAMS, ROUND, ServedNode, until
from support.reference import reference_vectors

pytestmark = pytest.mark.engine

K_DIM = 64
SKETCH = {"scheme": "sketch-v1", "params": {**PARAMS, "k_dim": K_DIM}}
NONCES = range(16)


def sketches(answer: Any) -> NDArray[np.float32]:
    return np.array([decode(each["vector_b64"], 2 * K_DIM) for each in answer["artifacts"]])


def test_the_sketches_of_a_node_are_within_the_noise_of_its_dtype(
    node: ServedNode, tiny: Path
) -> None:
    work = Workload(scheme("sketch-v1"), Block(ROUND["block_hash"], 7), ROUND["public_key"], 64)
    exact = reference_vectors(tiny, work, NONCES, torch.float32)
    noise = reference_vectors(tiny, work, NONCES, torch.bfloat16) - exact
    errors = sketches(node.prove([*NONCES], **SKETCH)) - exact
    ours, usual = np.linalg.norm(errors, axis=1), np.linalg.norm(noise, axis=1)
    print(
        f"node: {ours.mean():.5f}, {ours.max():.5f}; noise: {usual.mean():.5f}, {usual.max():.5f}"
    )
    assert ours.mean() < 1.5 * usual.mean()
    assert ours.max() < 2 * usual.max()
    another = sketches(node.prove([*NONCES], **SKETCH, block_height=8)) - exact
    assert np.linalg.norm(another, axis=1).min() > 10 * usual.max()


def test_a_round_and_a_job_of_any_batch_give_the_same_bits(node: ServedNode, tiny: Path) -> None:
    digest = node.call("GET", "/versions")["weights_digest"]
    assert digest == weights_digest(tiny)
    before, first = node.chat("Tell me about rivers."), len(node.results())
    node.start_round(**SKETCH, weights_digest=digest)
    until(lambda: node.processed() >= 32)
    assert node.chat("Tell me about rivers.") == before
    node.stop()
    config = node.status()["config"]
    assert (config["scheme"], config["k_dim"]) == ("sketch-v1", K_DIM)
    rows = {row["nonce"]: row["vector_b64"] for row in node.results()[first:]}
    wanted = [31, 0, 7, 12, 5]
    got = node.prove(wanted, batch_size=3, **SKETCH)["artifacts"]
    assert got == [{"nonce": nonce, "vector_b64": rows[nonce]} for nonce in wanted]
    # As a validator asks that has no checkpoint.
    work = Workload(scheme("sketch-v1"), Block(ROUND["block_hash"], 7), ROUND["public_key"], 64)
    with NodeClient(node.server.url) as client:
        claims = by_node(work, client)(wanted)
    assert [claim.vector_b64 for claim in claims] == [rows[nonce] for nonce in wanted]


def test_the_node_judges_sketches_by_a_threshold(node: ServedNode) -> None:
    test = {"stat_test": {"dist_threshold": 0.1, "fraud_threshold": 1e-6}}
    artifacts = node.prove([*NONCES], **SKETCH)["artifacts"]
    claims = {"validation": {"artifacts": artifacts}}
    honest = node.prove([*NONCES], **SKETCH, **claims, **test)
    assert (honest["fraud_detected"], honest["p_value"]) == (False, 1.0)
    forged = node.prove([*NONCES], **SKETCH, **claims, **test, public_key="another")
    assert forged["fraud_detected"]
    assert forged["p_value"] < 1e-6


def test_smoke_checks_take_the_scheme(node: ServedNode) -> None:
    options = ("--url", node.server.url, "--seq-len", "32", "--scheme", "sketch-v1")
    found = CliRunner().invoke(app, ["check", "smoke", "--protocol", "artifact", *options])
    assert found.exit_code == 0, found.output
    assert "FAIL" not in found.output
    assert "128 finite numbers" in found.output


def test_the_node_signs_what_a_challenge_gets(node: ServedNode) -> None:
    """Through vLLM's own application and server."""
    heard, order = Transcript(), Work(NAME, "block", seq_len=64, k_dim=K_DIM, scheme="sketch-v1")
    with NodeClient(node.server.url, transcript=heard) as client:
        client.answer_within(order, range(2), 600.0)
        client.results()
        said = client.versions()
    assert [each.is_signed for each in heard.signed] == [True] * 3
    assert {each.public_key.hex() for each in heard.signed} == {
        node.call("GET", "/versions")["public_key"]
    }
    assert not heard.unsigned
    assert "proofserve" in said
