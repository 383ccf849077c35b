import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.cli.model import SmallModel
from proofserve.cli.servers import ServerOptions
from proofserve.cli.validator import calibrate
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import DistanceWork
from support.stub_node import StubNode, stub_node

FEW = ("--nonces", "120", "--blocks", "2", "--keys", "2")


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["calibrate", "r-target", *args])


@pytest.fixture
def uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes whose second block has no winners with sign flips."""
    honest = StubNode.distance

    def distance(self: StubNode, nonce: int, work: dict[str, Any]) -> float:
        off = 1.0 if work["use_sign_flips"] and work["block_hash"].endswith("1") else 0.0
        return honest(self, nonce, work) + off

    monkeypatch.setattr(StubNode, "distance", distance)


@pytest.fixture
def deployments(
    deployments: list[ServerOptions], monkeypatch: pytest.MonkeyPatch
) -> list[ServerOptions]:
    """Deployments of checkpoints that the test never writes."""

    def checkpoint(model: SmallModel) -> Path:
        return Path(f"/models/{model.family}-{model.size}-{model.weights_seed}")

    monkeypatch.setattr(calibrate, "checkpoint", checkpoint)
    return deployments


def test_the_help_has_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "proofserve calibrate r-target --json" in result.output


def test_figures_and_picture_of_a_server_that_runs(tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "distances.png"
    with stub_node() as (stub, url):
        result = run("--url", url, *FEW, "--json", str(figures), "--png", str(picture))
    assert result.exit_code == 0, result.output
    assert stub.state == "STOPPED"
    read = json.loads(figures.read_text())
    assert read["passed"] is True
    assert list(read["models"]) == ["stub"]
    methods = read["models"]["stub"]
    assert list(methods) == ["sign_flips", "layer_hooks"]
    for method, found in methods.items():
        assert found["setup"]["method"] == method
        assert found["mean"] == pytest.approx(1.4142, abs=0.003)
        assert found["r_target"] == pytest.approx(1.404, abs=0.004)
        assert found["machine"]["vllm"] == "0"
    assert methods["sign_flips"]["r_target"] != methods["layer_hooks"]["r_target"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result.output.count("spread_beyond_sampling") == 2


@pytest.mark.usefixtures("uneven")
def test_blocks_that_differ_with_sign_flips_are_exit_code_1(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with stub_node() as (_, url):
        result = run("--url", url, *FEW, "--json", str(file))
    assert result.exit_code == 1, result.output
    read = json.loads(file.read_text())
    assert read["passed"] is False
    assert read["models"]["stub"]["sign_flips"]["failed"] == ["spread_beyond_sampling"]
    assert read["models"]["stub"]["layer_hooks"]["failed"] == []
    assert "FAIL" in result.output


def test_both_small_models_are_the_default(
    deployments: list[ServerOptions], tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    result = run(*FEW, "--json", str(file))
    assert result.exit_code == 0, result.output
    assert [each.name for each in deployments] == ["small-qwen3", "small-llama"]
    assert list(json.loads(file.read_text())["models"]) == ["small-qwen3", "small-llama"]


def test_no_two_models_share_their_weights(deployments: list[ServerOptions]) -> None:
    result = run(*FEW, "--models", "qwen", "llama", "gemma")
    assert result.exit_code == 0, result.output
    assert len({each.checkpoint.name.rpartition("-")[2] for each in deployments}) == 3


def test_a_user_can_choose_models_and_size(deployments: list[ServerOptions]) -> None:
    result = run(*FEW, "--models", "gemma", "--size", "tiny")
    assert result.exit_code == 0, result.output
    assert [each.name for each in deployments] == ["tiny-gemma3"]


def test_the_default_nonces_fill_whole_forwards() -> None:
    per_key, rest = divmod(calibrate.NONCES, 3)
    assert rest == 0
    assert per_key % calibrate.BATCH_SIZE == calibrate.BATCH_SIZE % calibrate.FORWARD_BATCH == 0
    assert calibrate.NONCES > 2000


def test_a_node_that_generates_is_not_disturbed_and_the_command_reports_it() -> None:
    with stub_node() as (stub, url):
        with NodeClient(url) as node:
            node.start_round(DistanceWork("stub"))
        result = run("--url", url, *FEW)
        assert stub.state == "GENERATING"
    assert result.exit_code == 2
    assert "Already generating" in result.output
    assert "Traceback" not in result.output


def test_too_few_nonces_are_refused_before_a_server_starts(
    deployments: list[ServerOptions],
) -> None:
    result = run("--nonces", "12", "--blocks", "2")
    assert result.exit_code == 2
    assert "24 nonces are too few" in result.output
    assert deployments == []


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("--rate", "1.5"), "--rate"),
        (("--blocks", "1"), "--blocks"),
        (("--keys", "0"), "--keys"),
        (("--models", "qwen", "--url", "http://127.0.0.1:9"), "--models"),
        (("llama",), "llama"),
    ],
)
def test_invalid_options_are_refused(args: tuple[str, ...], complaint: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert complaint in result.output


def test_an_unknown_model_is_refused_before_any_is_measured() -> None:
    result = run("--models", "qwen", "gpt5", "--size", "tiny")
    assert result.exit_code == 2
    assert "gpt5" in result.output
    assert "starting" not in result.output
