"""The environment of a server that we start: which of vLLM's model runners it uses."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from proofserve.wiring import launch
from proofserve.wiring.launch import (
    ServerCommand,
    ServerFailed,
    free_port,
    runner_choice,
    running_server,
    server_command,
)

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.delenv(RUNNER, raising=False)
    monkeypatch.setattr(launch, "vllm_version", lambda: version)


def test_a_cpu_build_uses_the_first_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.32.0+cpu")
    assert server_command("model", [], {}).env[RUNNER] == "0"


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cu129"])
def test_on_a_gpu_the_choice_is_left_to_vllm(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, version)
    assert RUNNER not in server_command("model", [], {}).env


def test_a_version_whose_second_runner_was_not_vetted_uses_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, "0.29.0")
    assert server_command("model", [], {}).env[RUNNER] == "0"


@pytest.mark.parametrize(
    ("version", "module"), [("0.26.0+cpu", launch.OLD_VLLM_SERVER), ("0.29.1", launch.VLLM_SERVER)]
)
def test_the_server_of_a_version(
    version: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, version)
    assert server_command("model", [], {}).argv[2] == module


def test_without_vllm_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    assert runner_choice() == {}


def test_the_choice_of_the_operator_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.32.0+cpu")
    monkeypatch.setenv(RUNNER, "1")
    assert server_command("model", [], {}).env[RUNNER] == "1"


def test_a_port_is_for_one_caller_and_its_server_can_bind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    monkeypatch.setattr(launch, "PORTS", range(port, port + 1))
    with pytest.raises(OSError, match="is free"):
        free_port()
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_server_that_starts_has_time_as_long_as_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MOVES_S", 0.1)
    script = "import time\nend = time.time() + 8\nwhile time.time() < end: pass\ntime.sleep(99)"
    command = ServerCommand((sys.executable, "-c", script), dict(os.environ))
    began = time.monotonic()
    with (
        pytest.raises(ServerFailed, match="neither answered nor computed anything for 3 s"),
        running_server(command, free_port(), tmp_path / "server.log", still_s=3.0),
    ):
        raise AssertionError("there is no such server")
    assert time.monotonic() - began > 8
