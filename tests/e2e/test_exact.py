"""``verify`` with an engine that it trusts bit for bit: two starts of a real vLLM, and others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli import servers
from proofserve.cli.main import app
from proofserve.cli.servers import ServerOptions
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve_lab.checkpoints import claims_of_model
from support.four_bits import one_thread
from support.models import TINY_THRESHOLD, SmallModels
from support.node import PARAMS, ROUND, ServedNode, until

pytestmark = pytest.mark.engine

NONCES = 24
CLOSE = ("--dist-threshold", TINY_THRESHOLD)
# A file does not say which nonces its prover owes.
ALL = ("--lane", "0:1")
Artifacts = list[dict[str, Any]]
Write = Callable[[Artifacts], Path]


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, args)])


@pytest.fixture(scope="module")
def published(served: ServedNode) -> Artifacts:
    """What the node publishes for the nonces from 0, in their order."""
    artifacts: Artifacts = served.prove([*range(NONCES)])["artifacts"]
    return artifacts


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(artifacts: Artifacts) -> Path:
        fields = ("block_hash", "block_height", "public_key")
        body = {
            **{name: ROUND[name] for name in fields},
            **{"artifacts": artifacts, "nonces": list(range(NONCES)), "params": PARAMS},
            "encoding": {"dtype": "f16", "k_dim": PARAMS["k_dim"], "endian": "le"},
        }
        path = tmp_path / "artifacts.json"
        path.write_text(json.dumps(body))
        return path

    return written


def proved_by(folder: Path) -> Artifacts:
    """By the reference engine, whose kernels are no vLLM's."""
    work = Work(
        "tiny",
        block_hash=str(ROUND["block_hash"]),
        block_height=7,
        public_key=str(ROUND["public_key"]),
        seq_len=64,
    )
    with one_thread():
        claims = claims_of_model(folder, work, range(NONCES))
    return [{"nonce": claim.nonce, "vector_b64": claim.vector_b64} for claim in claims]


def test_the_round_of_an_equal_engine_is_cleared_by_twenty_nonces(
    node: ServedNode, measured: ServedNode
) -> None:
    node.start_round()
    until(lambda: node.processed() >= NONCES)
    node.stop()
    result = run(node.server.url, "--recompute-url", measured.server.url, "--nonces", str(NONCES))
    assert result.exit_code == 0, result.output
    assert "exact     honest: equal bits in 20 of 20 nonces" in result.output
    assert "A node that forges 30% of its nonces or more would have been cleared" in result.output
    # By them engines of one processor may differ.
    said = node.call("GET", "/versions")["kernels"]
    assert said["instructions"].startswith(torch.backends.cpu.get_cpu_capability())
    assert said["instructions"].endswith(("with AMX", "with bfloat16", "without bfloat16"))
    assert said["ops"] == "vLLM"


def test_no_checkpoint_is_loaded_for_a_node_whose_bits_are_equal(
    published: Artifacts, measured: ServedNode, tiny: Path, write: Write, tmp_path: Path
) -> None:
    record = tmp_path / "outcome.json"
    by = ("--recompute-url", measured.server.url, "--model", tiny, *CLOSE, *ALL, "--json", record)
    result = run(write(published), *by)
    assert result.exit_code == 0, result.output
    outcome = json.loads(record.read_text())
    assert [each["test"] for each in outcome["findings"]] == ["exact"]
    assert (outcome["nonces_used"], outcome["excluded_share"]) == (20, 0.3)


def test_an_honest_node_on_another_engine_is_judged_by_the_other_tests(
    measured: ServedNode, tiny: Path, write: Write
) -> None:
    source, by = write(proved_by(tiny)), ("--recompute-url", measured.server.url)
    alone = run(source, *by)
    assert alone.exit_code == 2, alone.output
    assert "of 20 nonces: the engines differ" in alone.output
    assert "For the other tests give --model and --calibration, or --dist-threshold" in alone.output
    judged = run(source, *by, "--model", tiny, *CLOSE, *ALL)
    assert judged.exit_code == 0, judged.output
    assert "exact     undecided: other bits in " in judged.output
    assert "count     honest: 0 mismatches" in judged.output


def test_a_node_that_forges_half_of_its_nonces_is_convicted_by_the_others(
    published: Artifacts, measured: ServedNode, tiny: Path, small_models: SmallModels, write: Write
) -> None:
    other = proved_by(small_models.get("qwen3", seed=1))
    half: Artifacts = [other[n] if n % 2 else published[n] for n in range(NONCES)]
    by = ("--recompute-url", measured.server.url, "--model", tiny, *CLOSE)
    result = run(write(half), *by)
    assert result.exit_code == 1, result.output
    assert "exact     undecided: other bits in " in result.output
    assert "count     fraud: " in result.output
    assert run(write(half), *by, "--test", "exact").exit_code == 2


def test_a_missing_vector_is_no_equal_one(
    published: Artifacts, measured: ServedNode, write: Write
) -> None:
    # All that were drawn are looked at, whatever the seed.
    everyone = ("--nonces", str(NONCES), "--share", "0.2")
    source = write([each for each in published if each["nonce"] != 7])
    result = run(source, "--recompute-url", measured.server.url, *everyone)
    assert result.exit_code == 2, result.output
    assert f"exact     undecided: no vector in 1 of {NONCES} nonces" in result.output
    assert "nonce 7: missing" in result.output


def test_an_engine_with_other_weights_is_refused(
    published: Artifacts, measured: ServedNode, small_models: SmallModels, write: Write
) -> None:
    other = small_models.get("qwen3", seed=1)
    result = run(write(published), "--recompute-url", measured.server.url, "--model", other)
    assert result.exit_code == 3, result.output
    assert f"weights_digest: {measured.server.url} serves " in result.output


def test_an_engine_of_its_own_serves_the_checkpoint(
    published: Artifacts,
    measured: ServedNode,
    tiny: Path,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server is one that runs already: that such a server starts is tested elsewhere."""
    started: list[ServerOptions] = []

    def serving(wanted: ServerOptions, _session: object) -> NodeClient:
        started.append(wanted)
        return NodeClient(measured.server.url)

    monkeypatch.setattr(servers, "serving", serving)
    result = run(write(published), "--model", tiny, "--engine", "vllm:tp2", *ALL)
    assert result.exit_code == 0, result.output
    (wanted,) = started
    assert (wanted.checkpoint, wanted.ranks, wanted.scheme) == (tiny, 2, "artifact-v1")
    assert wanted.dtype == "auto"
    assert "those whose bits are equal to the vectors of vllm:tp2" in result.output


@pytest.mark.slow
def test_a_server_of_its_own_is_started_and_stopped(
    published: Artifacts, tiny: Path, write: Write
) -> None:
    result = run(write(published), "--model", tiny, "--engine", "vllm", *ALL)
    # Where tests serve in float32, the engines differ.
    assert result.exit_code in {0, 2}, result.output
    assert ("exact     honest" in result.output) == (result.exit_code == 0)
