"""The steps of ``make gpu`` that need a server, in their short form against one real node."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.node import ServedNode

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
STEPS = ("noise-vllm-v1", "generation", "chat-priority", "same-batch")


def run(folder: Path, *args: str | Path) -> dict[str, Any]:
    path = os.pathsep.join((str(ROOT / "tools"), str(ROOT / "src"), os.environ["PYTHONPATH"]))
    done = subprocess.run(
        [sys.executable, "-m", "gpu", "--device", "cpu", "--short", "--out", folder, *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    found = json.loads((folder / "gpu-report.json").read_text())
    return {step["name"]: step for step in found["steps"]}


def test_every_step_with_a_server(measured: ServedNode, tiny: Path, tmp_path: Path) -> None:
    url = measured.server.url
    steps = run(tmp_path, "--model", tiny, "--url", url, "--only", *STEPS)
    assert tuple(steps) == STEPS
    for step in steps.values():
        assert step["outcome"] == "passed", step
    real = steps["noise-vllm-v1"]["record"]["populations"][0]
    assert not real["facts"]["emulated"]
    assert 0 < statistics.median(real["figures"]["lengths"]) < 0.1
    assert steps["generation"]["record"]["nonces_per_second"] > 0
    assert steps["chat-priority"]["record"]["identical"] == 2
    costs = steps["same-batch"]["record"]
    assert costs["errors"] == 0
    for kind in ("dedicated", "same_batch"):
        assert costs[f"proof_tokens_per_second_{kind}"] > 0
        assert costs[f"chat_tokens_lost_per_proof_token_{kind}"] is not None
    page = (tmp_path / "gpu-report.html").read_text()
    assert "What a token of proofs costs chat" in page
