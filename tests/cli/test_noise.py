import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from lab.stub_node import stub_node
from proofserve.cli.main import app
from proofserve.cli.servers import ServerOptions
from proofserve.engines.reference.suspects import SUSPECTS
from proofserve.lab.calibrate.calibration_file import read
from proofserve.lab.verify.claimed import Selection, from_file
from support.four_bits import one_thread
from support.models import SmallModels

# The fewest nonces that can measure the rate.
FEW = ("--nonces", "48", "--rate", "0.08", "--seq-len", "8")
SKETCHES = ("--scheme", "sketch-v1")
REFERENCES = ("--one", "reference:float32", "--other", "reference:bfloat16")


def run(*args: str | Path) -> Result:
    with one_thread():
        return CliRunner().invoke(app, ["calibrate", "noise", *map(str, args)])


def test_the_help_has_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "proofserve calibrate noise --json" in result.output


def test_two_dtypes_of_one_model(tiny: Path, tmp_path: Path) -> None:
    figures, picture = tmp_path / "noise.json", tmp_path / "noise.png"
    result = run(tiny, *REFERENCES, *FEW, "--json", figures, "--png", picture)
    assert result.exit_code == 0, result.output
    written = json.loads(figures.read_text())
    ((title, found),) = written["pairs"].items()
    assert title == f"{tiny.name}: reference:float32 against reference:bfloat16"
    assert written["passed"] is found["passed"] is True
    distances = found["windows"]["distances"]
    assert len(distances) == 48
    assert found["maximum"] == max(distances) <= found["dist_threshold"] < 0.1
    assert 0 < found["median"] < found["quantile"] <= found["windows"]["interval"][1]
    # At the quantile some nonces mismatch, and this convicts no honest node.
    assert found["convicted_sequential"] == found["convicted_fixed"] == 0
    assert found["cleared_sequential"] > 990
    scheme = {"name": "artifact-v1", "k_dim": 12, "stronger_rng": False}
    assert found["setup"]["scheme"] == scheme
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "convicted_fixed" in result.output


def test_another_machines_artifacts_are_saved_and_compared(tiny: Path, tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    layers = ("--scheme", "artifact-v1-layers", "--k-dim", "8")
    saved = run(tiny, "--one", "reference:bfloat16", "--save", there, *layers, *FEW)
    assert saved.exit_code == 0, saved.output
    claimed = from_file(there, Selection())
    assert claimed.nonces == tuple(range(48))
    assert (claimed.seq_len, claimed.width, claimed.scheme) == (8, 8, "artifact-v1-layers")
    # The file names the block, key and nonces to compute.
    figures = tmp_path / "noise.json"
    compared = run(tiny, "--other", there, "--rate", "0.08", "--json", figures)
    assert compared.exit_code == 0, compared.output
    (found,) = json.loads(figures.read_text())["pairs"].values()
    assert 0 < found["median"] < 0.1
    alone = run("--one", there, "--other", there, "--rate", "0.08", "--json", figures)
    assert alone.exit_code == 0, alone.output
    (found,) = json.loads(figures.read_text())["pairs"].values()
    assert (found["maximum"], found["dist_threshold"]) == (0.0, 0.0)


def test_the_command_measures_running_nodes(tmp_path: Path) -> None:
    figures = tmp_path / "noise.json"
    with stub_node() as (stub, url), stub_node() as (_, other):
        result = run("--one", url, "--other", other, *FEW, "--json", figures)
        assert result.exit_code == 0, result.output
        stub.habits.failing_nonce = 40
        gap = run("--one", url, "--other", other, *FEW)
        assert gap.exit_code == 2
        assert "computed no vector for" in gap.output
    assert json.loads(figures.read_text())["pairs"][f"{url} against {other}"]["maximum"] == 0.0


def test_a_calibration_is_a_file_that_is_read_strictly(
    tiny: Path, small_models: SmallModels, tmp_path: Path
) -> None:
    out, there = tmp_path / "calibration.json", tmp_path / "there.json"
    bank = ("--bank", "8", "--suspect", small_models.get("qwen3", seed=1))
    made = run(tiny, *REFERENCES, *FEW, *SKETCHES, *bank, "--out", out)
    assert made.exit_code == 0, made.output
    calibration = read(out)
    same = run(tiny, *REFERENCES, *FEW, "--bank", "8", "--suspect", tiny, "--out", there)
    assert same.exit_code == 2
    assert f"suspect {tiny.name}: its vectors are those of the published" in same.output
    assert (calibration.model, calibration.dtype) == (tiny.name, "float32")
    assert calibration.shape == {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "intermediate_size": 512,
    }
    assert (calibration.scheme, calibration.seq_len, calibration.k_dim) == ("sketch-v1", 8, 64)
    assert calibration.engines == ("reference:float32", "reference:bfloat16")
    assert (len(calibration.distances), calibration.p_mismatch) == (48, 0.08)
    assert calibration.least_alpha(calibration.fit) == 1 / 48
    # The reference engine has the validator's own kernels.
    assert calibration.paired is None
    expected, honest = calibration.directions()
    assert set(expected) == set(honest) == {*SUSPECTS, "qwen3-1"}
    assert expected["int4 g128"].mean > 0.9
    assert 0 < honest["int4 g128"].sd < 0.5
    assert 0 < calibration.quantiles["0.5"] < calibration.quantiles["1"]
    assert calibration.quantiles["1"] <= calibration.dist_threshold < 0.1
    assert calibration.p_mismatch_interval[0] == 0.0 < calibration.p_mismatch_interval[1] < 0.08
    # Two files do not name their model, and equal vectors measure no noise.
    run(tiny, "--one", "reference:float32", "--save", there, *FEW)
    files = ("--one", there, "--other", there, "--rate", "0.08", "--out", tmp_path / "none.json")
    unnamed = run(*files)
    assert unnamed.exit_code == 2
    assert "a file does not name its model" in unnamed.output
    with stub_node() as (_, url), stub_node() as (_, other):
        none = ("--out", tmp_path / "none.json")
        same = run("--one", url, "--other", other, *FEW, *none)
    assert same.exit_code == 2
    assert "some vectors of the engines are equal" in same.output
    assert not (tmp_path / "none.json").exists()


def test_the_command_starts_the_named_servers(
    deployments: list[ServerOptions], tiny: Path, tmp_path: Path
) -> None:
    result = run(tiny, "--one", "vllm", "--other", "vllm:tp2", *FEW, "--forward-batch", "4")
    assert result.exit_code == 0, result.output
    assert [(each.checkpoint, each.ranks) for each in deployments] == [(tiny, 1), (tiny, 2)]
    assert {each.forward_batch for each in deployments} == {4}
    saved = run(tiny, "--one", "vllm", "--save", tmp_path / "a.json", *FEW)
    assert saved.exit_code == 0, saved.output
    assert len(deployments) == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--nonces", "100"), "It takes 368, or --rate 0.037"),
        (("--one", "reference:int3"), "'reference:int3' is not an engine and not a file"),
        (("--other", "vllm:tp0"), "0 ranks are outside 1..64"),
        (("gpt5",), "'gpt5' is not a folder, and not one of qwen"),
        (("--size", "huge", "qwen"), "unknown size 'huge'"),
        (("--other", "http://127.0.0.1:9"), "give the one model"),
        (("qwen", "llama", "--save", "a.json"), "give the one model"),
        (("qwen", "--save", "a.json", "--json", "b.json"), "give --other"),
        (("qwen", "--save", "a.json", "--out", "b.json"), "give --other"),
        (("--out", "calibration.json"), "--out needs exactly one model: name it"),
        (
            ("qwen", "--one", "http://x", "--other", "http://y"),
            "no engine needs a model here: leave out qwen",
        ),
        (("--scheme", "distance-v1"), "distance-v1 has no artifacts"),
        (("--rate", "0.5"), "--rate"),
    ],
)
def test_invalid_options_are_refused_before_any_computation(
    args: tuple[str, ...], message: str
) -> None:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert "nonces ..." not in result.output


def test_files_of_two_different_tasks_are_refused(tiny: Path, tmp_path: Path) -> None:
    paths = []
    for seq_len in (4, 8):
        paths.append(tmp_path / f"{seq_len}.json")
        options = ("--save", paths[-1], "--nonces", "8", "--seq-len", str(seq_len))
        assert run(tiny, "--one", "reference:bfloat16", *options).exit_code == 0
    result = run("--one", paths[0], "--other", paths[1])
    assert result.exit_code == 2
    assert "the two files differ in seq_len" in result.output
