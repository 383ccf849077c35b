import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli.main import app
from support.models import TINY_THRESHOLD, SmallModels

# Most of an audit's time is that of its simulated verifications.
SIMULATED = ("--verifications", "200")
SHORT = ("--quick", "--max-nonces", "200", *SIMULATED)
FEW = (*SHORT, "--nonces", "12", "--seq-len", "32", "--forward-batch", "12")
# A tenth of forged nonces shows in 99.9 % of verifications within as many.
LONGER = ("--max-nonces", "500")
SKETCHES = ("--scheme", "sketch-v1")


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, args)])


def audited(record: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The JSON, and its attacks by name."""
    found = json.loads(record.read_text())
    return found, {each["name"]: each for each in found["attacks"]}


def test_a_model_in_which_every_layer_matters(tiny: Path, tmp_path: Path) -> None:
    record, page = tmp_path / "audit.json", tmp_path / "audit.html"
    result = run(tiny, *FEW, *LONGER, *SKETCHES, "--json", record, "--html", page)
    found, attacks = audited(record)
    missed = {name: each["saving"] for name, each in attacks.items() if not each["caught"]}
    # Twelve nonces tell little of the sizes of honest errors, and no suspect predicts these.
    # A tenth of the nonces is less than a verdict excludes by default.
    missed.pop("honest on 90%, else zero vectors", None)
    costly = {name for name, saving in missed.items() if saving >= 0.1}
    assert all("by chance" in name or "in private" in name for name in costly), costly
    assert "first layer's projections kept per token" in missed
    assert result.exit_code in {0, 1}, result.output
    assert found["setup"]["scheme"] == "sketch-v1"
    assert found["setup"]["values"] == 128
    assert found["setup"]["nonces_per_prover"] == 12
    assert found["setup"]["honest"] == "the kernels emulated in this audit"
    assert found["suspects"] == ["int4 g128", "fp8 per channel", "int8 per channel", "int8 g32"]
    # Each of them is named by the direction of its errors.
    for index, name in enumerate(found["suspects"]):
        assert max(attacks[name]["cosines"]) == attacks[name]["cosines"][index] > 0.5
    honest = [each["name"] for each in found["honest"]]
    assert honest[0] == "as deployed"
    # All but that of the validator's own run.
    assert {*honest} - {*found["populations"]} == {"vLLM on x86 with bfloat16"}
    assert {each["convicted"] for each in found["honest"]} == {0.0}
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.usefixtures("few_kernels")
def test_the_network_s_scheme_is_audited(tiny: Path, tmp_path: Path) -> None:
    record = tmp_path / "audit.json"
    result = run(tiny, *FEW, "--dist-threshold", TINY_THRESHOLD, "--json", record)
    assert result.exit_code in {0, 1}, result.output
    found, attacks = audited(record)
    assert found["setup"]["values"] == 12
    assert found["rule"]["dist_threshold"] == float(TINY_THRESHOLD)
    assert attacks["int4 g128"]["caught"]
    assert attacks["model skipped"]["caught"]
    assert "last token only" in attacks


@pytest.mark.usefixtures("few_kernels")
def test_pruned_experts_are_shown_under_both_routings(
    small_models: SmallModels, tmp_path: Path
) -> None:
    record = tmp_path / "audit.json"
    result = run(small_models.mixture(), *FEW, "--scheme", "sketch-v2", "--json", record)
    assert result.exit_code in {0, 1}, result.output
    found, attacks = audited(record)
    own, *natural = found["beside"]["sketch-v1"]
    names = ["a quarter of the experts pruned", "half of the experts pruned"]
    assert [each["name"] for each in natural] == names
    assert own["name"] == "as deployed"
    for each, name in zip(natural, names, strict=True):
        assert each["saving"] == attacks[name]["saving"] > 0.1
        assert each["distances"] != attacks[name]["distances"]
        assert min(attacks[name]["distances"]) > 3 * found["honest"][0]["distance_mean"]
    assert "Rows that end in sketch-v1" in result.output


@pytest.mark.usefixtures("few_kernels")
def test_a_model_that_can_be_skipped(small_models: SmallModels, tmp_path: Path) -> None:
    record = tmp_path / "audit.json"
    flat = small_models.flat()
    run(flat, *FEW, "--dist-threshold", "0.17", "--json", record)
    _, attacks = audited(record)
    skipped = attacks["model skipped"]
    # By the count alone it would be missed; by the sizes of distances it is not.
    assert skipped["mismatch_rate"] == 0.0
    assert skipped["count"]["fixed_nonces"] is None
    assert max(skipped["distances"]) < 0.12
    assert skipped["nonces"]["paired"]["at_power"] is not None
    assert attacks["random unit vectors"]["caught"] is True


@pytest.mark.usefixtures("few_kernels")
def test_a_calibration_is_of_the_audited_work(small_models: SmallModels, tmp_path: Path) -> None:
    calibration, record = tmp_path / "calibration.json", tmp_path / "audit.json"
    flat = str(small_models.flat())
    few = ("--nonces", "16", "--emulated", "16", "--bank", "8", "--seq-len", "8", *SIMULATED)
    made = CliRunner().invoke(app, ["calibrate", "noise", flat, *few, "--out", str(calibration)])
    assert made.exit_code == 0, made.output
    of_it = (*SHORT, "--nonces", "8", "--calibration", calibration)
    result = run(flat, *of_it, "--seq-len", "8", "--json", record)
    assert result.exit_code in {0, 1}, result.output
    found, _ = audited(record)
    assert found["setup"]["honest"].startswith("calibration of flat: 0 measured and ")
    longer = run(flat, *of_it, "--seq-len", "16")
    assert longer.exit_code == 3, longer.output
    assert "seq_len: the calibration has 8, the artifacts have 16" in longer.output


@pytest.mark.usefixtures("few_kernels")
def test_a_threshold_below_the_noise_is_unfit(tiny: Path) -> None:
    result = run(tiny, *SHORT, "--nonces", "8", "--seq-len", "8", "--dist-threshold", "0.001")
    assert result.exit_code == 1, result.output
    assert result.output.splitlines()[-1].startswith("UNFIT: an honest node would be convicted")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nonces", "none"), "--nonces"),
        (("--alpha", "0"), "alpha: 0.0 is not between 0 and 1"),
        (("--dtype", "int3"), "unknown dtype 'int3'"),
        (("--scheme", "distance-v1"), "distance-v1 has no artifacts"),
        (("--scheme", "sketch-v9"), "'sketch-v9' is none of"),
        ((*SKETCHES, "--stronger-rng"), "stronger_rng: sketch-v1 has no such option"),
        (("--k-dim", "100000"), "k_dim"),
        (("--seq-len", "1000000"), "seq_len 1000000 exceeds the model's"),
        (("--other", "/nowhere"), "/nowhere is no checkpoint"),
        (("--suspect", "/nowhere"), "/nowhere is no checkpoint"),
        (("--dtype", "float32"), "served_dtype: servers do not round in float32"),
    ],
)
def test_a_model_that_cannot_be_audited_gives_no_verdict(
    tiny: Path, options: tuple[str, ...], message: str
) -> None:
    result = run(tiny, "--quick", "--nonces", "8", "--seq-len", "4", *options)
    assert result.exit_code == 3, result.output
    assert message in result.output


@pytest.mark.usefixtures("few_kernels")
def test_a_small_model_is_audited_by_its_name(tmp_path: Path) -> None:
    figures = tmp_path / "audit.json"
    result = run("trained", *SHORT, "--nonces", "8", "--seq-len", "4", "--json", figures)
    # Eight nonces are too few to clear the model, and enough to measure it.
    assert result.exit_code in {0, 1}, result.output
    assert json.loads(figures.read_text())["setup"]["model"] == "trained"


def test_a_model_that_is_neither_a_name_nor_a_folder_is_refused() -> None:
    result = run("gpt5", "--quick")
    assert result.exit_code == 3, result.output
    assert "'gpt5' is not a folder, and not one of qwen, llama, gemma, qwen3_moe," in result.output


def test_the_help_has_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "proofserve audit ./model --calibration" in result.output
