"""``proofserve serve`` as an operator runs it, up to the moment at which vLLM would start."""

import re
import socket
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli import serve
from proofserve.cli.main import app
from proofserve.outbox.database import hold_lock
from proofserve.settings.node import NodeSettings
from proofserve.wiring.launch import ServerCommand

KEY, OTHER, VIEWERS = "first-secret", "second-secret", "third-secret"
# A terminal wide enough for every path on one line.
WIDE = {"COLUMNS": "400", "TERMINAL_WIDTH": "400"}
OPEN = ("--host", "0.0.0.0")  # noqa: S104


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ServerCommand]:
    """The server that the command would start, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("POC_API_KEY", "POC_VIEWER_KEY", "POC_API_KEYS_FILE", "POC_ALLOW_ANONYMOUS"):
        monkeypatch.delenv(name, raising=False)
    commands: list[ServerCommand] = []
    monkeypatch.setattr(serve, "exec_server", commands.append)
    return commands


def serve_command(*args: str, **variables: str) -> Result:
    return CliRunner().invoke(app, ["serve", *args], env={**WIDE, **variables})


def run(*args: str, **variables: str) -> Result:
    return serve_command("model", "--enable-poc", *args, **variables)


def said(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def test_every_setting_is_an_option_with_its_variable_and_its_help() -> None:
    text = said(serve_command("--help"))
    for name, field in NodeSettings.model_fields.items():
        assert re.search(rf"{serve.NODE_OPTIONS.flag(name)} ", text)
        assert re.search(rf"env var: POC_{name.upper()}[;\]]", text)
        assert field.description


def test_options_win_over_variables_and_variables_over_defaults(
    started: list[ServerCommand],
) -> None:
    variables = {"POC_FORWARD_BATCH": "8", "POC_SHARE": "0.5", "POC_OUTBOX": "mine.sqlite"}
    assert run("--host", "127.0.0.1", "--poc-share", "0.25", **variables).exit_code == 0
    env = started[0].env
    names = ["POC_FORWARD_BATCH", "POC_SHARE", "POC_OUTBOX", "POC_DEFER_SEC"]
    assert [env[name] for name in names] == ["8", "0.25", "mine.sqlite", "5.0"]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--poc-share", "3", "at least 0 and at most 0.9"),
        ("--poc-share", "nan", "finite"),
        ("--poc-forward-batch", "0", "at least 1 and at most 1024"),
        ("--poc-forward-batch", "many", "integer"),
        ("--poc-lease-idle-sec", "0", "more than 0"),
        ("--poc-callback-max-retries", "-1", "at least 0"),
    ],
)
def test_every_setting_is_checked_before_vllm_starts(
    option: str, value: str, words: str, started: list[ServerCommand]
) -> None:
    variable = option.removeprefix("--").replace("-", "_").upper()
    for result in (
        run("--host", "127.0.0.1", option, value),
        run("--host", "127.0.0.1", **{variable: value}),
    ):
        assert result.exit_code == 2
        assert option in said(result)
        assert variable in said(result)
        assert words in said(result)
    assert started == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "the model must come first"),
        (("--host", "0.0.0.0", "model"), "the model must come first"),  # noqa: S104
        (("--enable-poc", "--port", "80", "model"), "the model must come first"),
        (("./nowhere", "--host", "127.0.0.1"), "the model folder ./nowhere does not exist"),
    ],
)
def test_a_mistake_in_the_command_is_one_clear_line(
    args: tuple[str, ...], words: str, started: list[ServerCommand]
) -> None:
    result = serve_command(*args)
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert words in line
    assert started == []


def test_a_port_in_use_is_one_clear_line(started: list[ServerCommand]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        result = run("--host", "127.0.0.1", "--port", port)
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert f"127.0.0.1:{port}: Address already in use" in line
    assert started == []


def test_keys_reach_the_server_and_only_by_its_environment(started: list[ServerCommand]) -> None:
    keys = ("--poc-api-key", KEY, "--poc-api-key", OTHER, "--poc-viewer-key", VIEWERS)
    assert run(*OPEN, *keys).exit_code == 0
    (command,) = started
    assert command.env["POC_API_KEY"] == f"{KEY},{OTHER}"
    assert command.env["POC_VIEWER_KEY"] == VIEWERS
    assert "secret" not in " ".join(command.argv)
    assert command.argv[-2:] == OPEN


def test_a_key_in_the_environment_is_accepted(started: list[ServerCommand]) -> None:
    assert run(*OPEN, POC_API_KEY=KEY).exit_code == 0
    assert started[0].env["POC_API_KEY"] == KEY


def test_the_options_of_callbacks_reach_the_server(started: list[ServerCommand]) -> None:
    allow = ("--poc-callback-allow", "https://host", "--poc-callback-allow", "10.0.0.0/8")
    options = ("--poc-api-key", KEY, *allow, "--poc-callback-secret", OTHER)
    assert run(*options).exit_code == 0
    assert started[0].env["POC_CALLBACK_ALLOW"] == "https://host,10.0.0.0/8"
    assert started[0].env["POC_CALLBACK_SECRET"] == OTHER
    assert "secret" not in " ".join(started[0].argv)


def test_without_a_key_the_server_may_listen_on_loopback(started: list[ServerCommand]) -> None:
    assert run("--host", "127.0.0.1").exit_code == 0
    assert "POC_API_KEY" not in started[0].env


def test_without_a_key_the_server_may_not_listen_on_other_addresses(
    started: list[ServerCommand],
) -> None:
    for options in ((), OPEN):
        result = run(*options)
        assert result.exit_code == 2
        assert "--poc-api-key" in said(result)
        assert "--poc-allow-anonymous" in said(result)
    assert started == []


def test_with_allow_anonymous_the_server_may_listen_without_a_key(
    started: list[ServerCommand],
) -> None:
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
def test_a_value_that_is_not_valid_is_refused_without_showing_a_key(
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


def test_an_outbox_in_a_missing_folder_is_refused(started: list[ServerCommand]) -> None:
    result = run("--host", "127.0.0.1", "--poc-outbox", "nowhere/outbox.sqlite")
    assert result.exit_code == 2
    assert "No such file or directory" in said(result)
    assert started == []
