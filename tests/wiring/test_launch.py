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


ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


@pytest.mark.parametrize(
    ("variables", "endpoint", "protocol"),
    [
        ({}, None, None),
        ({ENDPOINT: "http://c:4318/"}, "http://c:4318/v1/traces", "http/protobuf"),
        ({ENDPOINT: "http://c:4317", PROTOCOL: "grpc"}, "http://c:4317", "grpc"),
        ({ENDPOINT: "http://c", TRACES: "http://t/x"}, "http://t/x", "http/protobuf"),
        ({TRACES: "http://t/x", "OTEL_SDK_DISABLED": "True"}, None, None),
        ({TRACES: "http://t/x", "OTEL_TRACES_EXPORTER": "none"}, None, None),
    ],
)
def test_vllm_exports_traces_where_the_variables_say(
    variables: dict[str, str],
    endpoint: str | None,
    protocol: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = server_command("model", [], {})
    asked = ("--otlp-traces-endpoint", endpoint) if endpoint else ()
    assert command.argv[5:] == asked
    assert command.env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") == protocol
    assert command.env.get("OTEL_SERVICE_NAME") == (endpoint and "proofserve-node")
    own = server_command("model", ["--otlp-traces-endpoint", "http://own"], {})
    assert own.argv[5:] == ("--otlp-traces-endpoint", "http://own")


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
