import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli.main import app
from support.models import TINY_THRESHOLD, SmallModels

FEW = ("--nonces", "12", "--seq-len", "32", "--forward-batch", "12")
CLOSE = ("--dist-threshold", TINY_THRESHOLD)


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, args)])


def test_a_model_in_which_every_layer_matters(tiny: Path, tmp_path: Path) -> None:
    record, page = tmp_path / "audit.json", tmp_path / "audit.html"
    result = run(tiny, *FEW, *CLOSE, "--json", record, "--html", page)
    found = json.loads(record.read_text())
    caught = {each["name"]: each["caught"] for each in found["attacks"]}
    rounded = {name: caught.pop(name) for name in list(caught) if name.startswith("weights")}
    subtle = {name: caught.pop(name) for name in list(caught) if name.startswith("honest on")}
    assert all(caught.values()), caught
    assert rounded["weights of 4 bits"]
    # In bfloat16 8 bits of weight are hardly fewer, and the exit code says that it matters.
    assert not rounded["weights of 8 bits"]
    assert list(subtle.values()) == [True, True, False]
    assert result.exit_code == 1, result.output
    verdict = result.output.splitlines()[-1]
    assert verdict.startswith("NOT CAUGHT within 1000 nonces: ")
    assert "weights of 8 bits (saves 49%)" in verdict
    assert found["honest"]["mismatch_rate"] == 0.0
    assert found["setup"]["nonces_per_attack"] == 12
    assert found["setup"]["model"] == tiny.name
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_a_model_that_can_be_skipped(small_models: SmallModels, tmp_path: Path) -> None:
    record = tmp_path / "audit.json"
    result = run(small_models.flat(), *FEW, "--dist-threshold", "0.17", "--json", record)
    assert result.exit_code == 1, result.output
    assert "NOT CAUGHT within 1000 nonces: model skipped (saves 100%)" in result.output
    attacks = {each["name"]: each for each in json.loads(record.read_text())["attacks"]}
    skipped = attacks["model skipped"]
    assert skipped["caught"] is False
    assert skipped["mismatch_rate"] == 0.0
    assert max(skipped["distances"]) < 0.12
    assert skipped["needed"].startswith("a threshold below 0.0")
    assert attacks["random unit vectors"]["caught"] is True


def test_a_strict_threshold_catches_a_skipped_model(small_models: SmallModels) -> None:
    strict = run(small_models.flat(), *FEW, "--dist-threshold", "0.02")
    assert "model skipped" not in strict.output.splitlines()[-1]


def test_without_a_threshold_one_line_says_how_to_measure_it(tiny: Path) -> None:
    result = run(tiny, *FEW)
    assert result.exit_code == 3, result.output
    assert "proofserve calibrate noise MODEL --seq-len N --out FILE" in result.output
    assert result.output.count("\n") == 1


def test_a_calibrated_threshold_catches_what_a_guessed_one_lets_pass(
    small_models: SmallModels, tmp_path: Path
) -> None:
    calibration, record = tmp_path / "calibration.json", tmp_path / "audit.json"
    flat = str(small_models.flat())
    engines = ("--one", "reference:float32", "--other", "reference:bfloat16")
    few = ("--nonces", "48", "--rate", "0.08", "--seq-len", "32", "--out", str(calibration))
    made = CliRunner().invoke(app, ["calibrate", "noise", flat, *engines, *few])
    assert made.exit_code == 0, made.output
    caught = {}
    for threshold in (("--dist-threshold", "0.1"), ("--calibration", calibration)):
        result = run(flat, *FEW, *threshold, "--json", record)
        assert result.exit_code == 1, result.output
        read = json.loads(record.read_text())
        caught[threshold[0]] = {each["name"] for each in read["attacks"] if each["caught"]}
    lost = {"weights of 4 bits", "middle layer skipped", "every fourth layer skipped"}
    assert lost & caught["--dist-threshold"] == set()
    assert lost <= caught["--calibration"]
    assert read["setup"]["threshold"].startswith("calibration of flat: reference:float32 against")
    longer = run(flat, *FEW, "--seq-len", "64", "--calibration", calibration)
    assert longer.exit_code == 3, longer.output
    assert "seq_len: the calibration has 32, the artifacts have 64" in longer.output


def test_a_threshold_below_the_noise_is_unfit(tiny: Path) -> None:
    result = run(tiny, *FEW, "--dist-threshold", "0.001", "--nonces", "8")
    assert result.exit_code == 1, result.output
    assert result.output.splitlines()[-1].startswith("UNFIT: 100.0% of honest vectors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nonces", "none"), "--nonces"),
        (("--alpha", "0"), "alpha: 0.0 is not between 0 and 1"),
        (("--dtype", "int3"), "unknown dtype 'int3'"),
        (("--scheme", "distance-v1"), "distance-v1 has no such option"),
        (("--k-dim", "100000"), "k_dim"),
        (("--seq-len", "1000000"), "seq_len 1000000 exceeds the model's"),
        (("--other", "/nowhere"), "/nowhere is no checkpoint"),
    ],
)
def test_a_model_that_cannot_be_audited_gives_no_verdict(
    tiny: Path, options: tuple[str, ...], message: str
) -> None:
    result = run(tiny, *CLOSE, "--nonces", "1", "--seq-len", "4", *options)
    assert result.exit_code == 3, result.output
    assert message in result.output


def test_the_help_has_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "proofserve audit ./model --calibration" in result.output
