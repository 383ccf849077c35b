"""``python -m gpu`` as a user starts it: without a card, and in its short form on the processor."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Those that need no server: these run here, the others in tests/e2e/test_gpu.py.
ALONE = ("models", "reference", "profile")


def start(*args: str | Path, python: str | Path = sys.executable) -> "subprocess.Popen[str]":
    path = os.pathsep.join((str(ROOT / "tools"), str(ROOT / "src"), os.environ["PYTHONPATH"]))
    return subprocess.Popen(
        [str(python), "-m", "gpu", *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*args: str | Path) -> tuple[int, str]:
    process = start(*args)
    output, _ = process.communicate()
    return process.returncode, output


def reported(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gpu-report.json").read_text())
    return found


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has a card")
def test_without_a_card_the_report_says_what_was_skipped(tmp_path: Path) -> None:
    code, output = run("--out", tmp_path)
    assert code == 0, output
    found = reported(tmp_path)
    assert found["finished"]
    assert len(found["steps"]) == 15
    assert {step["outcome"] for step in found["steps"]} == {"skipped"}
    assert {step["reason"].partition(":")[0] for step in found["steps"]} == {"no card"}
    assert "so all steps are skipped" in output
    assert "0 passed, 0 failed, 15 skipped" in output
    page = (tmp_path / "gpu-report.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "no card: torch" in page


def test_every_step_without_a_server_runs_on_the_processor(tiny: Path, tmp_path: Path) -> None:
    short = ("--device", "cpu", "--short", "--model", tiny, "--out", tmp_path)
    code, output = run(*short, "--only", *ALONE)
    assert code == 0, output
    found = reported(tmp_path)
    steps = {step["name"]: step for step in found["steps"]}
    assert tuple(steps) == ALONE
    assert {step["outcome"] for step in steps.values()} == {"passed"}
    assert steps["reference"]["record"]["nonces_per_second_8_4"] > 0
    profile = steps["profile"]["record"]
    forwards = profile["windows"]["forwards"]
    assert [each["scheme"] for each in forwards] == ["artifact-v1", "distance-v1", "sketch-v1"]
    for each in forwards:
        assert sum(each["shares"].values()) == pytest.approx(1)
        assert min(each["seconds"].values()) > 0
        assert each["kernels"][0]["ms"] > 0
    assert (tmp_path / "gpu-report.html").read_text().count("<svg") == 2
    # Again: what has passed is kept, and nothing runs.
    again, output = run(*short, "--resume", "--only", "golden-not")
    assert again == 2, output
    assert "golden-not" in output
    code, output = run(*short, "--resume", "--only", "models")
    assert code == 0, output
    assert "models ..." not in output
    assert reported(tmp_path)["steps"] == found["steps"]


def test_a_stopped_run_keeps_what_it_has(tmp_path: Path) -> None:
    process = start("--device", "cpu", "--short", "--out", tmp_path, "--only", "golden", "models")
    log = tmp_path / "golden.log"
    deadline = time.monotonic() + 60
    while not log.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130, output
    found = reported(tmp_path)
    assert not found["finished"]
    assert [(step["name"], step["reason"]) for step in found["steps"]] == [
        ("golden", "stopped by hand")
    ]
    assert (tmp_path / "gpu-report.html").exists()


def test_golden_vectors_are_counted_and_a_case_that_differs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (few := tmp_path / "golden").mkdir()
    data = ROOT / "tests" / "golden" / "data"
    shutil.copy(data / "signs.json", few)
    body = json.loads((data / "pick.json").read_text())
    body["cases"][0]["expect"]["per_nonce"][0]["order_cuda"].reverse()
    (few / "pick.json").write_text(json.dumps(body))
    monkeypatch.setenv("GOLDEN_DIR", str(few))
    code, output = run("--device", "cpu", "--out", tmp_path, "--only", "golden")
    assert code == 1, output
    (step,) = reported(tmp_path)["steps"]
    assert (step["outcome"], step["reason"]) == ("failed", "beyond their limits: cases_failed")
    record = step["record"]
    assert record["cases_passed"] == sum(record["windows"]["passed"].values()) > 1
    assert record["files"] == 2
    assert record["cases_failed"] == 1
    assert record["setup"] == {"device": "cpu", "inputs_drawn_by": "torch"}
    (failure,) = record["windows"]["failures"]
    assert body["cases"][0]["id"] in failure["test"]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkout, and a Python without any package."""
    for name in ("tools", "src", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    venv.create(tmp_path / "host", with_pip=True)
    return tmp_path


def test_a_host_without_packages_and_index_gets_a_report_too(bare: Path) -> None:
    (wheels := bare / "wheels").mkdir()
    done = subprocess.run(
        [bare / "host" / "bin" / "python", "scripts/gpu.py", "--wheels", wheels],
        cwd=bare,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not installed: " in done.stdout
    found = reported(bare / "gpu-report")
    assert found["host"]["torch"]["problem"] == "torch is not installed"
    assert all(step["outcome"] == "skipped" for step in found["steps"])
    assert found["steps"][1]["reason"] == "not installed: numpy torch; see docs/gpu.md"


def test_packages_for_a_host_without_an_index_are_listed() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/gpu.py", "--packages"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = done.stdout.split()
    assert {"pydantic", "fastapi", "transformers", "safetensors", "pytest"} <= set(names)
    # The host has its own, for its cards.
    assert "torch" not in names
    assert "proofserve" not in names
