"""A version of vLLM without a row in the table: refused, or started when its names are there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from proofserve.settings.process import environment
from support.node import ServedNode, serve
from support.other_vllm import other_vllm

pytestmark = pytest.mark.engine

WHERE = ("--host", "127.0.0.1", "--port", "0")
IDLE_CALLS = "_idle_state_callbacks"


# Prints what each check of a configuration says. One process imports vLLM once for all of them.
CHECKS = """
import json, sys
from typer.testing import CliRunner
from proofserve.cli.main import app
for command in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, command)
    (line,) = [line for line in done.output.splitlines() if line.startswith("vLLM: ")]
    print(f"{line} ({done.exit_code})")
"""


def checked(model: Path, folder: Path, env: dict[str, str], *options: tuple[str, ...]) -> list[str]:
    """What ``serve --check-config`` with each of ``options`` says about vLLM, and its exit code."""
    command = ["serve", str(model), "--enable-poc", *WHERE, "--check-config"]
    command += ["--poc-outbox", str(folder / "outbox.sqlite")]
    done = subprocess.run(
        [sys.executable, "-c", CHECKS, json.dumps([[*command, *each] for each in options])],
        env=environment(env),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-len(options) :]


def test_it_is_refused_with_the_way_out_and_names_what_it_lacks(tiny: Path, tmp_path: Path) -> None:
    gone = {"v1/engine/core.py": (IDLE_CALLS, "_other_callbacks")}
    env = other_vllm(tmp_path / "other", "0.99.0", gone)
    refused, lacking = checked(tiny, tmp_path, env, (), ("--poc-unvetted",))
    assert "FAILED: vLLM 0.99.0 was not vetted" in refused
    assert "--poc-unvetted" in refused
    assert refused.endswith("(2)")
    assert f"EngineCore without {IDLE_CALLS}, needed by chat before proofs" in lacking
    assert lacking.endswith("(2)")


@pytest.mark.slow
def test_with_every_name_it_proves_what_the_vetted_one_does(
    node: ServedNode, tiny: Path, tmp_path: Path
) -> None:
    env = other_vllm(tmp_path / "other", "0.99.0", {})
    (accepted,) = checked(tiny, tmp_path, env, ("--poc-unvetted",))
    assert "version 0.99.0 was not vetted; " in accepted
    assert accepted.endswith("(0)")
    with serve(tiny, tmp_path, POC_UNVETTED="1", **env) as other:
        assert other.call("GET", "/versions")["vllm_version"] == "0.99.0"
        assert other.prove([0, 1, 2])["artifacts"] == node.prove([0, 1, 2])["artifacts"]
    assert "vLLM version 0.99.0 was not vetted" in (tmp_path / "server.log").read_text()
