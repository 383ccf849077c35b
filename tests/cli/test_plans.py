"""Plans of a configuration alone: what they say, and that they write nothing."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.engines.reference.kernels import SERVED
from proofserve.models.trained import CALIBRATIONS, DENSE
from proofserve.protocol import SKETCH
from support.models import SmallModels

# Runs commands and prints what each of them wrote, by Python's own account of opened files.
WATCHED = """
import json, os, sys, tempfile
import torch._dynamo
from typer.testing import CliRunner
from proofserve.cli.main import app

# Both look for a folder of temporary files, torch when it is imported: no plan asks for that.
tempfile.gettempdir()
written = []

def watch(event, args):
    if event == "open" and isinstance(args[0], str) and args[0] != "/dev/null":
        if (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.append(args[0])
    elif event in {"os.mkdir", "os.rename", "os.link", "os.symlink", "tempfile.mkstemp"}:
        written.append(f"{event} {args[0]}")

sys.addaudithook(watch)
for command in json.loads(sys.argv[1]):
    found = CliRunner().invoke(app, command)
    print(json.dumps([found.exit_code, found.output, written]))
    written.clear()
"""


def plan_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("plan: ")]


def forwards(output: str) -> dict[str, int]:
    (line,) = (line for line in plan_of(output) if "forwards of a nonce" in line)
    return {kind: int(n) for kind, n in re.findall(r"(truth|own runs|suspects) (\d+)", line)}


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Path:
    """A folder with the tiny model's configuration, and nothing else."""
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(tiny / "config.json", folder)
    return folder


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, args), "--plan"])


def test_no_plan_writes_anything(config: Path, tmp_path: Path) -> None:
    file, home = str(config / "config.json"), tmp_path / "home"
    home.mkdir()
    sketch = ["--scheme", "sketch-v2"]
    commands = [
        ["verify", "--plan", "--model", str(config), *sketch, "--nonces", "100"],
        ["verify", "--plan", "--model", file, "--test", "direction", "--nonces", "3"],
        ["challenge", "--plan", "--model", str(config)],
        ["calibrate", "noise", str(config), "--plan", *sketch],
        ["audit", file, "--plan", "--quick"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, json.dumps(commands)],
        env={
            **{"HOME": str(home), "PYTHONPATH": ":".join(sys.path)},
            **{"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        },
        capture_output=True,
        text=True,
        check=True,
    )
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ended) == len(commands)
    for command, (code, output, written) in zip(commands, ended, strict=True):
        assert (code, written) == (0, []), f"{command}: {output}"
        assert "on this machine" in plan_of(output)[-1], output
    assert [*tmp_path.rglob("*")] == [config, home, config / "config.json"]


def test_a_verdict_is_planned_with_a_calibration_and_without(
    config: Path, calibrated: Path
) -> None:
    sketches = ("--scheme", "sketch-v2", "--nonces", "100")
    alone = run("verify", "--model", config, *sketches)
    assert alone.exit_code == 0, alone.output
    assert "of 100 nonces until an honest node is cleared (512 tokens each)" in alone.output
    found = forwards(alone.output)
    # Of the first two nonces our own run of each reference, then of the likeliest, which is run
    # in two orders.
    assert found["own runs"] == 2 * found["truth"] + 2 * len(SERVED)
    # Two nonces show how far a suspect reaches; a calibration has measured that.
    assert found["suspects"] > 0
    known = run("verify", "--model", config, "--calibration", calibrated, "--nonces", "100")
    assert known.exit_code == 0, known.output
    assert forwards(known.output) == {each: found[each] for each in ("truth", "own runs")}
    counted = run("verify", "--model", config, "--dist-threshold", "0.1", *sketches)
    assert forwards(counted.output).keys() == {"truth"}
    usual = run("verify", "--model", config, "--nonces", "3")
    assert "(256 tokens each)" in usual.output


@pytest.mark.parametrize("command", ["verify", "challenge"])
def test_without_a_plan_something_has_to_be_judged(
    config: Path, command: str, calibrated: Path
) -> None:
    options = ["--model", str(config), "--calibration", str(calibrated)]
    refused = CliRunner().invoke(app, [command, *options])
    assert refused.exit_code == 3
    assert "only --plan needs none" in " ".join(refused.output.split())


@pytest.fixture
def calibrated() -> Path:
    """Any calibration of sketches: what it holds for does not matter here."""
    return Path(str(DENSE.files())) / CALIBRATIONS[SKETCH]


def test_a_short_sketch_is_warned_of(config: Path, calibrated: Path, tmp_path: Path) -> None:
    warning = "a verdict needs some 5.3 times as many nonces"
    short = ("--scheme", "sketch-v2", "--k-dim", "12")
    assert warning in run("verify", "--model", config, *short, "--nonces", "9").output
    body = json.loads(calibrated.read_text())
    (file := tmp_path / "short.json").write_text(json.dumps({**body, "k_dim": 12}))
    assert warning in run("challenge", "--model", config, "--calibration", file).output
    assert warning not in run("challenge", "--model", config, "--calibration", calibrated).output


def test_a_quantised_configuration_has_smaller_layers_and_fewer_suspects(config: Path) -> None:
    plain = run("calibrate", "noise", config, "--bank", "8")
    body = json.loads((config / "config.json").read_text())
    body["quantization_config"] = {"quant_method": "gptq", "bits": 8, "group_size": 32}
    (config / "config.json").write_text(json.dumps(body))
    quantised = run("calibrate", "noise", config, "--bank", "8")
    assert quantised.exit_code == 0, quantised.output
    assert 0 < forwards(quantised.output)["suspects"] < forwards(plain.output)["suspects"]


def test_a_plan_of_a_small_model_needs_it_in_the_cache(
    small_models: SmallModels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("proofserve.cli.model.cache_folder", lambda: tmp_path / "cache")
    refused = run("calibrate", "noise", "qwen")
    assert refused.exit_code == 2
    assert "qwen is not in the cache, and a plan writes nothing" in " ".join(refused.output.split())
    assert not (tmp_path / "cache").exists()
