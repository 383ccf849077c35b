"""The commands as a user runs them, against a stub node."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli import main, servers
from proofserve.cli.main import COMMANDS, app
from proofserve.cli.servers import ServedModel, ServerOptions
from proofserve.cli.session import EXIT_NO_VERDICT
from proofserve.remote.node_client import NodeClient
from proofserve.settings.process import environment
from proofserve_lab.bench import chat
from proofserve_lab.bench import command as bench
from proofserve_lab.check import checks
from proofserve_lab.check import command as check
from support.odd_server import odd_server
from support.stub_node import Habits, stub_node


@pytest.fixture
def few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 windows each waits for a few batches of the stub first."""
    batch, busy, _, window_s = bench.DEFAULTS["tiny"]
    monkeypatch.setitem(bench.DEFAULTS, "tiny", (batch, busy, 4, window_s))


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


@pytest.mark.parametrize(
    "command",
    [
        "",
        "serve",
        "demo",
        "receive",
        "outbox",
        "outbox status",
        "outbox retry",
        "outbox export",
        "model new",
        "check",
        "check smoke",
        "check e2e",
        "check coexist",
        "bench",
        "bench generation",
        "bench chat-priority",
        "bench reference",
        "bench receipts",
        "calibrate noise",
        "calibrate r-target",
        "verify",
    ],
)
def test_every_command_has_a_help_text(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_commands_says_what_the_help_of_each_begins_with(command: str) -> None:
    *_, line = COMMANDS[command]
    _, _, described = " ".join(run(command, "--help").output.split()).partition(line)
    assert described


def test_the_list_of_commands_loads_none_of_them() -> None:
    code = "import sys; from proofserve.cli.main import app; app(['--help'], standalone_mode=False)"
    loads = f"{code}; print('loaded:', *({{'torch', 'vllm', 'aiohttp'}} & sys.modules.keys()))"
    shown = subprocess.run(
        [sys.executable, "-c", loads], capture_output=True, text=True, check=True
    ).stdout
    assert "verify-chat" in shown
    assert shown.splitlines()[-1] == "loaded:"


def test_a_command_that_was_mistyped_is_guessed() -> None:
    result = run("chekc")
    assert result.exit_code == 2
    assert "Did you mean 'check'?" in result.output


# Longer than a pipe: a part of it is written when its reader leaves.
LONG_OUTPUT = """
import typer
from proofserve.cli.session import VerdictCommand

app = typer.Typer()

@app.command(cls=VerdictCommand)
def many_lines() -> None:
    for number in range(100_000):
        print(number)

app()
"""


@pytest.mark.parametrize(
    ("argv", "lines"), [(("-m", "proofserve", "verify", "--help"), 0), (("-c", LONG_OUTPUT), 1)]
)
def test_a_reader_who_has_read_enough_gets_no_verdict(argv: tuple[str, ...], lines: int) -> None:
    command = (sys.executable, *argv)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        for _ in range(lines):
            running.stdout.readline()
        running.stdout.close()
        running.stdout = None
        _, errors = running.communicate(timeout=120)
    assert (running.returncode, errors) == (EXIT_NO_VERDICT, b"")


LARGE_TENSOR = """
from typer.main import get_command
from proofserve.cli.main import app
commands = get_command(app)
commands.resolve_command(commands.context_class(commands), ['verify'])
import torch
kept = torch.ones(2**23)
print(kept.data_ptr() % 4096)
"""


@pytest.mark.parametrize(("chosen", "huge"), [({}, True), ({"THP_MEM_ALLOC_ENABLE": "0"}, False)])
def test_a_validator_asks_for_huge_pages_unless_the_operator_chose(
    chosen: dict[str, str], huge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A test before may have called a validator's command in this process.
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    argv, env = (sys.executable, "-c", LARGE_TENSOR), environment(chosen)
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    # torch begins what may have huge pages at a page's border, and nothing else there.
    assert (int(done.stdout) == 0) == huge


@pytest.mark.parametrize(
    ("args", "models"),
    [
        ((), ["default"]),
        (("--models", "qwen"), ["qwen"]),
        (("--models", "qwen", "llama"), ["qwen", "llama"]),
        (("--models", "qwen", "--models", "llama"), ["qwen", "llama"]),
        (("--models", "qwen", "llama", "--seq-len", "64"), ["qwen", "llama"]),
    ],
)
def test_several_models_can_be_named_in_both_ways(
    args: tuple[str, ...], models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def subjects(names: list[str], *_server: object) -> list[ServedModel]:
        seen.append(names)
        return []

    monkeypatch.setattr(check, "_subjects", subjects)
    result = run("check", "smoke", *args)
    assert result.exit_code == 0, result.output
    assert seen[0] == (["qwen"] if models == ["default"] else models)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("llama",), "llama"),
        (("--models", "qwen", "--url", "http://127.0.0.1:9"), "--models"),
        (("--models", "qwen", "--model", "."), "--model"),
        (("--model", "no-such-folder"), "no-such-folder"),
        (("--modles", "qwen"), "--modles"),
        (("--seq-len", "0"), "--seq-len"),
        (("--protocol", "neither"), "--protocol"),
    ],
)
def test_contradictory_options_are_refused(args: tuple[str, ...], complaint: str) -> None:
    result = run("check", "smoke", *args)
    assert result.exit_code == 2
    assert complaint in result.output


def test_an_unknown_model_is_refused_with_a_message() -> None:
    result = run("check", "smoke", "--models", "gpt5")
    assert result.exit_code == 2
    assert "gpt5" in result.output
    assert "Traceback" not in result.output


def test_a_server_that_does_not_run_is_exit_code_2() -> None:
    result = run("check", "smoke", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 2
    assert "http://127.0.0.1:9" in result.output


def test_checks_that_pass_are_exit_code_0() -> None:
    with stub_node() as (stub, url):
        result = run("check", "smoke", "--url", url)
    assert result.exit_code == 0, result.output
    assert result.output.count("PASS") == 16
    assert "16 checks, 0 failed" in result.output
    assert stub.state == "STOPPED"


@pytest.mark.parametrize(
    "command",
    [("check", "smoke", "--protocol", "artifact"), ("check", "e2e"), ("bench", "generation")],
)
@pytest.mark.usefixtures("few_windows")
def test_a_node_that_requires_a_key_gets_it(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POC_API_KEY", raising=False)
    seconds = ("--seconds", "1") if "bench" in command else ()
    with stub_node(Habits(api_key="s3cret", bare=1000.0, round=1000.0)) as (stub, url):
        refused = run(*command, "--url", url, *seconds)
        assert refused.exit_code == 2
        assert ": 401 " in refused.output
        assert stub.rounds == 0
        answered = run(*command, "--url", url, *seconds, "--api-key", "s3cret")
        assert ": 401 " not in answered.output
        assert answered.exit_code in (0, 1), answered.output
        assert "s3cret" not in answered.output
        assert stub.rounds > 0


def test_a_command_reads_a_key_from_the_servers_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    # The variable may list several keys.
    monkeypatch.setenv("POC_API_KEY", "s3cret,another")
    with stub_node(Habits(api_key="s3cret")) as (_, url):
        assert run("check", "smoke", "--url", url, "--protocol", "artifact").exit_code == 0


@pytest.mark.parametrize(
    ("protocol", "seen", "unseen"),
    [("artifact", "vectors are valid", "winner"), ("distance", "every winner", "vectors")],
)
def test_a_user_can_check_one_protocol_alone(protocol: str, seen: str, unseen: str) -> None:
    with stub_node() as (_, url):
        result = run("check", "smoke", "--url", url, "--protocol", protocol)
    assert result.exit_code == 0, result.output
    assert seen in result.output
    assert unseen not in result.output
    assert "chat answers" in result.output


def test_a_check_that_fails_is_exit_code_1() -> None:
    with stub_node(Habits(repeatable=False)) as (_, url):
        result = run("check", "smoke", "--url", url, "--protocol", "artifact")
    assert result.exit_code == 1
    assert result.output.count("FAIL") == 1


def test_e2e_at_a_url_names_the_checks_that_it_skips() -> None:
    with stub_node() as (_, url):
        result = run("check", "e2e", "--url", url)
    assert result.exit_code == 0, result.output
    assert result.output.count("SKIP") == 2
    assert "a server that we did not start" in result.output
    assert "winners with layer hooks are fraud without them" in result.output


def test_e2e_of_a_folder_serves_it_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ServerOptions] = []

    @contextmanager
    def serving(deployment: ServerOptions, _session: object) -> Iterator[NodeClient]:
        started.append(deployment)
        with stub_node() as (_, url), NodeClient(url) as node:
            yield node

    monkeypatch.setattr(servers, "serving", serving)
    folder = tmp_path / "my-checkpoint"
    folder.mkdir()
    result = run("check", "e2e", "--model", str(folder))
    assert result.exit_code == 0, result.output
    assert [(each.name, each.checkpoint) for each in started] == [("my-checkpoint", folder)] * 2
    # There is no checkpoint in this folder from which forged claims could be computed.
    assert result.output.count("SKIP") == 1
    assert "accepted after a restart" in result.output


def test_coexist_at_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SETTLE_S", "LOAD_S", "FULL_SPEED_S"):
        monkeypatch.setattr(checks, name, 0.2)
    # An answer that comes late on a busy machine is a large part of so short a time.
    monkeypatch.setattr(checks, "FULL_SPEED", 0.2)
    with stub_node(Habits(chat_tokens=1000.0)) as (_, url):
        result = run("check", "coexist", "--url", url)
    assert result.exit_code == 0, result.output


def test_bench_refuses_a_model_without_a_url() -> None:
    result = run("bench", "generation", "--model", "mine")
    assert result.exit_code == 2
    assert "--url" in result.output


@pytest.mark.usefixtures("few_windows")
@pytest.mark.parametrize("protocol", ["artifact", "distance"])
def test_bench_generation_writes_its_figures(protocol: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ("--protocol", protocol, "--seconds", "1", "--json", str(file))
    with stub_node(Habits(bare=1000.0, round=200.0)) as (_, url):
        result = run("bench", "generation", "--url", url, *options)
    assert result.exit_code == 1, result.output
    read = json.loads(file.read_text())
    assert 0.02 < read["busy_ratio"] < 0.5
    assert "busy_ratio" in read["failed"]
    assert read["machine"]["vllm"] == "0"
    assert read["setup"]["protocol"] == protocol
    assert f"{protocol} protocol" in result.output
    assert "FAIL" in result.output


def test_bench_chat_priority_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "SETTLE_S", 0.2)
    file = tmp_path / "figures.json"
    # Chats so slow that on a busy machine, too, eight clients are never all between two of them.
    with stub_node(Habits(truthful=False, chat_tokens=200.0)) as (_, url):
        options = ("--chats", "3", "--seconds", "1", "--pairs", "1", "--clients", "8")
        result = run("bench", "chat-priority", "--url", url, *options, "--json", str(file))
    assert result.exit_code == 1, result.output
    read = json.loads(file.read_text())
    assert (read["chats"], read["identical"], read["errors"]) == (3, 0, 0)
    assert read["proofs_while_saturated"] == 0
    assert read["proofs_afterwards"] > 0
    assert "identical" in read["failed"]


@pytest.mark.parametrize(
    ("command", "package", "code", "extra"),
    [
        ("verify-chat", "torch", EXIT_NO_VERDICT, "'proofserve[reference]'"),
        ("probe", "transformers.models", EXIT_NO_VERDICT, "'proofserve[reference]'"),
        ("demo", "proofserve_lab", 2, "'proofserve'"),
        ("check", "vllm", 2, "'proofserve[vllm]'"),
    ],
)
def test_a_missing_package_is_a_sentence_and_no_verdict(
    command: str, package: str, code: int, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_module: str) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(main, "import_module", missing)
    result = run(command)
    assert result.exit_code == code
    assert result.output == f"No module named {package!r}: pip install {extra}\n"


def test_a_package_that_is_missed_later_is_no_verdict_either(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "proofserve.verifier.validator", None)
    result = run("verify", "--plan", "--model", str(tmp_path), "--scheme", "sketch-v2")
    assert result.exit_code == EXIT_NO_VERDICT, result.output
    assert "proofserve.verifier.validator" in result.output


@pytest.mark.parametrize(
    ("place", "why"), [("", "it is a folder"), ("nowhere/x.json", "make its folder")]
)
def test_a_file_that_cannot_be_written_shows_before_the_work(
    place: str, why: str, tmp_path: Path
) -> None:
    at = tmp_path / place
    result = run("calibrate", "noise", "nix", "--out", str(at))
    assert result.exit_code == 2
    assert f"cannot write {at}: {why}" in result.output


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--port", "65536"), "--port"),
        (("--port", "-1"), "--port"),
        (("--database", "{folder}"), "cannot open"),
        (("--database", "{file}"), "cannot use"),
    ],
)
def test_a_receiver_that_cannot_start_says_why(
    args: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"SQLite format 3\0, and no more of it")
    result = run("receive", *(a.format(folder=tmp_path, file=tmp_path / "file") for a in args))
    assert result.exit_code == 2, result.output
    assert why in result.output


@pytest.mark.parametrize("body", [b"<html>", b"[" * 10**5, b"{}", b'{"members": 3}', b"[]"])
@pytest.mark.parametrize("command", ["members", "verdicts"])
def test_what_is_no_fleet_is_named(command: str, body: bytes) -> None:
    with odd_server(body) as url:
        result = run("fleet", command, "--url", url)
    assert result.exit_code == 2, result.output
    assert url in result.output


def test_what_is_no_node_is_named() -> None:
    with odd_server(b'{"data": {}}') as url:
        result = run("check", "smoke", "--url", url)
    assert result.exit_code == 2, result.output
    assert f"{url} does not answer as a node" in result.output
