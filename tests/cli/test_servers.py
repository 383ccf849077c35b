import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from proofserve.cli import servers
from proofserve.cli.servers import ServerOptions, serving, small_server
from proofserve.cli.session import CommandSession, Interrupts, ProgressLine
from proofserve.settings.node import ACCESS_VARIABLES
from proofserve.wiring.launch import ServerCommand, ServerFailed

DEPLOYMENT = ServerOptions(Path("/models/tiny"), "tiny", forward_batch=8, measure=True)


def test_the_command_names_model_forward_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    command = small_server(DEPLOYMENT, tmp_path)
    assert command.argv[command.argv.index("--model") + 1] == "/models/tiny"
    assert command.argv[command.argv.index("--served-model-name") + 1] == "tiny"
    assert "--enforce-eager" in command.argv
    assert command.env["POC_ENABLED"] == command.env["POC_MEASURE"] == "1"
    assert command.env["POC_FORWARD_BATCH"] == "8"
    assert command.env["POC_OUTBOX"] == str(tmp_path / "outbox.sqlite")
    assert command.env["TMPDIR"] == str(tmp_path)
    assert command.env["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_ranks_and_scheme_are_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    command = small_server(replace(DEPLOYMENT, ranks=2, scheme="artifact-v1-layers"), tmp_path)
    assert command.argv[command.argv.index("--tensor-parallel-size") + 1] == "2"
    assert command.env["POC_SCHEME"] == "artifact-v1-layers"
    # Each rank has its own core.
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in small_server(DEPLOYMENT, tmp_path).env


def test_share_and_receipts_are_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the user's shell says of a node must not change what a benchmark measures.
    monkeypatch.setenv("POC_SHARE", "0.7")
    monkeypatch.setenv("POC_RECEIPTS", "1")
    plain = small_server(DEPLOYMENT, tmp_path)
    assert float(plain.env["POC_SHARE"]) == 0
    assert plain.env["POC_RECEIPTS"] == "0"
    command = small_server(replace(DEPLOYMENT, share=0.25, receipts=True), tmp_path)
    assert float(command.env["POC_SHARE"]) == 0.25
    assert command.env["POC_RECEIPTS"] == "1"


def test_the_users_settings_override_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert small_server(DEPLOYMENT, tmp_path).env["VLLM_CPU_KVCACHE_SPACE"] == "7"


def test_keys_of_the_users_node_do_not_reach_our_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ACCESS_VARIABLES:
        monkeypatch.setenv(name, "something")
    assert not ACCESS_VARIABLES & small_server(DEPLOYMENT, tmp_path).env.keys()


@contextmanager
def open_session() -> Iterator[CommandSession]:
    console = Console(quiet=True)
    with Interrupts() as interrupts, ProgressLine(console) as line:
        yield CommandSession(console, interrupts, line)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, and a command that replaces vLLM."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def answer_with(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    real = small_server

    def fake(*args: Any) -> ServerCommand:
        return replace(real(*args), argv=("sh", "-c", script))

    monkeypatch.setattr(servers, "small_server", fake)


def test_a_server_that_fails_leaves_its_log(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, "echo no kernel for this machine; exit 3")
    with (
        pytest.raises(ServerFailed, match=r"(?s)no kernel.*kept as") as caught,
        open_session() as session,
        serving(DEPLOYMENT, session),
    ):
        raise AssertionError("there is no such server")
    (kept,) = scratch.iterdir()
    assert (kept / "server.log").read_text() == "no kernel for this machine\n"
    assert str(kept / "server.log") in str(caught.value)


def test_an_interrupt_while_starting_leaves_nothing(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The shell's parent is this process.
    answer_with(monkeypatch, "kill -INT $PPID; sleep 300")
    with (
        pytest.raises(SystemExit) as caught,
        open_session() as session,
        serving(DEPLOYMENT, session),
    ):
        raise AssertionError("there is no such server")
    assert caught.value.code == 128 + signal.SIGINT
    assert list(scratch.iterdir()) == []


def test_a_long_temporary_folder_leaves_room_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folders: list[Path] = []
    real = small_server

    def fake(deployment: ServerOptions, folder: Path) -> ServerCommand:
        folders.append(folder)
        return replace(real(deployment, folder), argv=("false",))

    monkeypatch.setattr(servers, "small_server", fake)
    with pytest.raises(ServerFailed), open_session() as session, serving(DEPLOYMENT, session):
        raise AssertionError("there is no such server")
    assert len(f"{folders[0]}/{uuid.uuid4()}") <= 107
    assert not folders[0].exists()


def test_the_dtype_is_the_servers(tmp_path: Path) -> None:
    for wanted in (DEPLOYMENT, replace(DEPLOYMENT, dtype="float32")):
        argv = small_server(wanted, tmp_path).argv
        assert argv[argv.index("--dtype") + 1] == wanted.dtype
