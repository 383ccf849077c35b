"""``proofserve serve`` as a person runs it, up to the moment at which vLLM would start."""

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli import serve
from proofserve.cli.main import app
from proofserve.outbox.database import hold_lock
from proofserve.wiring.launch import ServerCommand

KEY, OTHER, VIEWERS = "first-secret", "second-secret", "third-secret"
OPEN = ("--host", "0.0.0.0")  # noqa: S104


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ServerCommand]:
    """What would have been started, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("POC_API_KEY", "POC_VIEWER_KEY", "POC_API_KEYS_FILE", "POC_ALLOW_ANONYMOUS"):
        monkeypatch.delenv(name, raising=False)
    commands: list[ServerCommand] = []
    monkeypatch.setattr(serve, "exec_server", commands.append)
    return commands


def run(*args: str, **variables: str) -> Result:
    # Wide enough that no path is cut in two.
    wide = {"COLUMNS": "400", "TERMINAL_WIDTH": "400"}
    return CliRunner().invoke(app, ["serve", "model", "--enable-poc", *args], env=wide | variables)


def said(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def test_keys_reach_the_server_and_only_by_its_environment(started: list[ServerCommand]) -> None:
    keys = ("--poc-api-key", KEY, "--poc-api-key", OTHER, "--poc-viewer-key", VIEWERS)
    assert run(*OPEN, *keys).exit_code == 0
    (command,) = started
    assert command.env["POC_API_KEY"] == f"{KEY},{OTHER}"
    assert command.env["POC_VIEWER_KEY"] == VIEWERS
    assert "secret" not in " ".join(command.argv)
    assert command.argv[-2:] == OPEN


def test_a_key_in_the_environment_is_as_good(started: list[ServerCommand]) -> None:
    assert run(*OPEN, POC_API_KEY=KEY).exit_code == 0
    assert started[0].env["POC_API_KEY"] == KEY


def test_callbacks_are_told_where_to_go(started: list[ServerCommand]) -> None:
    allow = ("--poc-callback-allow", "https://host", "--poc-callback-allow", "10.0.0.0/8")
    options = ("--poc-api-key", KEY, *allow, "--poc-callback-secret", OTHER)
    assert run(*options).exit_code == 0
    assert started[0].env["POC_CALLBACK_ALLOW"] == "https://host,10.0.0.0/8"
    assert started[0].env["POC_CALLBACK_SECRET"] == OTHER
    assert "secret" not in " ".join(started[0].argv)


def test_without_a_key_it_may_listen_to_this_machine(started: list[ServerCommand]) -> None:
    assert run("--host", "127.0.0.1").exit_code == 0
    assert "POC_API_KEY" not in started[0].env


def test_without_a_key_it_may_not_listen_to_others(started: list[ServerCommand]) -> None:
    for options in ((), OPEN):
        result = run(*options)
        assert result.exit_code == 2
        assert "--poc-api-key" in said(result)
        assert "--poc-allow-anonymous" in said(result)
    assert started == []


def test_unless_everybody_is_let_in(started: list[ServerCommand]) -> None:
    assert run("--poc-allow-anonymous").exit_code == 0
    assert started[0].env["POC_ALLOW_ANONYMOUS"] == "1"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--poc-api-key", "se cret"), "--poc-api-key / POC_API_KEY"),
        (("--poc-api-key", KEY, "--poc-viewer-key", KEY), "equal"),
        (("--poc-api-key", KEY, "--poc-allow-anonymous"), "contradict"),
        (("--poc-api-keys-file", "nowhere.toml"), "nowhere.toml"),
        (("--poc-api-key", KEY, "--poc-callback-allow", "host"), "--poc-callback-allow"),
        (("--poc-k-dim", "0"), "--poc-k-dim / POC_K_DIM"),
    ],
)
def test_what_cannot_be_meant_is_refused_without_showing_a_key(
    options: tuple[str, ...], complaint: str, started: list[ServerCommand]
) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert complaint in said(result)
    assert "secret" not in said(result)
    assert "se cret" not in said(result)
    assert started == []


def test_an_outbox_of_another_server_is_refused_before_vllm_starts(
    started: list[ServerCommand], tmp_path: Path
) -> None:
    with hold_lock(tmp_path / "proofserve-outbox.sqlite"):
        result = run("--host", "127.0.0.1")
        assert result.exit_code == 2
        assert "another running server uses the outbox" in said(result)
        assert started == []
        assert run("--host", "127.0.0.1", "--poc-outbox", "mine.sqlite").exit_code == 0
    assert run("--host", "127.0.0.1").exit_code == 0
    assert len(started) == 2


def test_an_outbox_in_a_folder_that_is_not_there_is_refused(started: list[ServerCommand]) -> None:
    result = run("--host", "127.0.0.1", "--poc-outbox", "nowhere/outbox.sqlite")
    assert result.exit_code == 2
    assert "No such file or directory" in said(result)
    assert started == []
