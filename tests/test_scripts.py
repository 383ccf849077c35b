"""What lies beside the package: the scripts that start a server and a gateway."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
START = ROOT / "scripts" / "start_vllm_h100.sh"
# Prints its arguments, an empty line and the names of its variables, a line each.
STUB = "#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\necho\ncompgen -e\n"
H100 = [
    *("--gpu-memory-utilization", "0.90"),
    *("--max-num-seqs", "256"),
    *("--tensor-parallel-size", "1"),
    *("--dtype", "bfloat16"),
    "--trust-remote-code",
]

# Starts the script with these variables and arguments: what reached proofserve, and the names
# of its variables.
Start = Callable[..., tuple[list[str], set[str]]]


def run(*argv: str | Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    return subprocess.run(
        list(map(str, argv)),
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def start(tmp_path: Path) -> Start:
    stub = tmp_path / "proofserve"
    stub.write_text(STUB)
    stub.chmod(0o755)

    def start(*arguments: str, **variables: str) -> tuple[list[str], set[str]]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = run(START, *arguments, PATH=path, **variables)
        assert done.returncode == 0, done.stderr
        given, _, names = done.stdout.partition("\n\n")
        return given.splitlines(), set(names.split())

    return start


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_is_sound_and_may_be_run(script: Path) -> None:
    assert run("bash", "-n", script).returncode == 0
    assert os.access(script, os.X_OK)
    assert "\nset -euo pipefail\n" in script.read_text()


def test_by_default_it_is_the_gateways_default_backend(start: Start) -> None:
    given, _ = start()
    names = ["--served-model-name", "openai/gpt-oss-20b", "gpt-oss-20b"]
    assert given == ["serve", "openai/gpt-oss-20b", *names, "--port", "8001", *H100]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("openai/gpt-oss-20b", ["openai/gpt-oss-20b", "gpt-oss-20b"]),
        ("./my model", ["./my model", "my model"]),
        ("/models/tiny/", ["/models/tiny/", "tiny"]),
        ("tiny", ["tiny"]),
    ],
)
def test_a_model_is_served_under_its_full_and_its_short_name(
    model: str, names: list[str], start: Start
) -> None:
    given, _ = start(VLLM_MODEL=model)
    at = given.index("--served-model-name") + 1
    assert given[at : given.index("--port")] == names


def test_model_port_and_eager_are_variables(start: Start) -> None:
    given, names = start(VLLM_MODEL="./my model", VLLM_PORT="7001", VLLM_ENFORCE_EAGER="1")
    assert given[:2] == ["serve", "./my model"]
    assert given[5:] == ["--port", "7001", *H100, "--enforce-eager"]
    # To vLLM, VLLM_PORT is the first of the ports between its own processes.
    assert names.isdisjoint({"VLLM_MODEL", "VLLM_PORT", "VLLM_ENFORCE_EAGER"})
    assert "--enforce-eager" not in start(VLLM_ENFORCE_EAGER="0")[0]


def test_code_of_a_model_is_trusted_aloud_and_can_be_refused(start: Start, tmp_path: Path) -> None:
    assert start(VLLM_TRUST_REMOTE_CODE="1")[0].count("--trust-remote-code") == 1
    given, names = start(VLLM_TRUST_REMOTE_CODE="0")
    assert "--trust-remote-code" not in given
    assert "VLLM_TRUST_REMOTE_CODE" not in names
    # ``start`` has put its stub there.
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert "VLLM_TRUST_REMOTE_CODE=0 forbids it" in run(START, PATH=path).stderr
    assert run(START, PATH=path, VLLM_TRUST_REMOTE_CODE="0").stderr == ""


def test_arguments_and_other_variables_pass_through(start: Start) -> None:
    given, names = start("--enable-poc", "--host", "::1", VLLM_LOGGING_LEVEL="DEBUG")
    assert given[-3:] == ["--enable-poc", "--host", "::1"]
    assert "VLLM_LOGGING_LEVEL" in names


def test_it_explains_itself() -> None:
    done = run(START, "--help")
    assert done.returncode == 0
    variables = ("VLLM_MODEL", "VLLM_PORT", "VLLM_ENFORCE_EAGER", "VLLM_TRUST_REMOTE_CODE")
    for name in (*variables, "--enable-poc"):
        assert name in done.stdout


def test_without_proofserve_it_says_what_to_install(tmp_path: Path) -> None:
    # Only bash, and nothing of ours.
    (tmp_path / "bash").symlink_to("/bin/bash")
    done = run("/bin/bash", START, PATH=str(tmp_path))
    assert done.returncode == 127
    assert "pip install" in done.stderr


def test_the_gateway_script_is_the_gateway_command() -> None:
    done = run(sys.executable, ROOT / "run_vllm_gateway.py", "--help", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    command = run(sys.executable, "-m", "proofserve", "gateway", "--help", COLUMNS="200")
    options = [line for line in command.stdout.splitlines() if "VLLM_" in line]
    assert len(options) > 10
    assert [line for line in done.stdout.splitlines() if "VLLM_" in line] == options


def test_importing_the_gateway_script_starts_nothing() -> None:
    # As an engine core does, which is spawned and imports the main module again.
    done = run(
        sys.executable,
        "-c",
        f"import runpy; runpy.run_path({str(ROOT / 'run_vllm_gateway.py')!r}, run_name='__mp__')",
        "--no-such-option",
    )
    assert done.returncode == 0, done.stderr


def test_the_requirements_are_this_package_with_the_gpu_build() -> None:
    lines = (ROOT / "requirements-vllm.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [".[vllm]"]
