"""The command lines of ``deploy/`` start: ``--check-config`` checks each without a model."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from deploy.manifests import command, workloads, written
from deploy.test_units import Unit
from proofserve.cli.main import app
from proofserve.settings.process import environment
from support.readme import commands_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KEY = "a-key-for-tests"
# Where operators copy commands from: not the decisions under docs/adr, nor the page about the code.
DOCS = sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "structure.md"})
PAGES = [ROOT / "README.md", *DOCS]
# vLLM listens on all addresses; with one of these a server with proofs starts all the same.
SAFE = ("POC_API_KEY=", "--host 127.0.0.1", "--poc-allow-anonymous")


class Unset(ValueError):
    """A variable that compose requires has no value."""


def interpolated(text: str, variables: dict[str, str]) -> str:
    """The text as compose reads it: ``${NAME:-default}`` and ``${NAME:?message}``."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        if variables.get(name):
            return variables[name]
        if kind == ":?":
            raise Unset(f"{name}: {rest}")
        return str(rest)

    return re.sub(r"\$\{(\w+)(:-|:\?)([^}]*)\}", value, text)


class Checking:
    """Checks commands in this process, so that vLLM is imported once for all of them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        for name in environment({}):
            if name.startswith("POC_"):
                patch.delenv(name)
        # vLLM would set it for the rest of the process.
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.chdir(folder)

    def __call__(self, command: list[str], variables: dict[str, str]) -> Result:
        """Check a command as its file has it, but with an outbox and a port of this test."""
        outbox = re.compile(r"^/.*(?=/outbox\.sqlite$)")
        command = [outbox.sub(str(self._folder), word) for word in command]
        return CliRunner().invoke(app, [*command, "--port", "0"], env=variables)


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checking:
    return Checking(tmp_path, monkeypatch)


def compose_node(variables: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    node = yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"]["node"]
    command = shlex.split(interpolated(node["command"], variables))
    given = {name: interpolated(text, variables) for name, text in node["environment"].items()}
    return command, given


def unit_command(key: str) -> tuple[list[str], dict[str, str]]:
    """ExecStart as systemd expands it with node.env; ``$NAME`` becomes several words."""
    lines = (DEPLOY / "systemd" / "node.env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    words = Unit(DEPLOY / "systemd" / "proofserve.service")["Service"][key].split()
    expanded = [re.sub(r"^\$\{(\w+)\}$", lambda m: variables[m[1]], word) for word in words]
    options = shlex.split(variables["OPTIONS"])
    at = expanded.index("$OPTIONS")
    assert expanded[:2] == ["/usr/bin/env", "proofserve"]
    given = {name: text for name, text in variables.items() if name.startswith("POC_")}
    return expanded[2:at] + options + expanded[at + 1 :], given


def _with_exports(page: str) -> Iterator[str]:
    """The commands of a page, each below the variables that the page has exported before it."""
    exported: list[str] = []
    for each in commands_of(page):
        if each.text.startswith("export "):
            exported.append(each.text)
        else:
            yield "\n".join((*exported, each.text))


def documented_servers() -> Iterator[tuple[str, str]]:
    """Each command of the pages and of the script's own help that starts a server with proofs."""
    script = ROOT / "scripts" / "start_vllm_h100.sh"
    for page in (*PAGES, script):
        text = page.read_text()
        found = list(_with_exports(text)) if page != script else text.splitlines()
        prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
        for each in (*found, *re.findall(r"`([^`]+)`", prose)):
            starts = re.search(r"(proofserve serve|start_vllm_h100\.sh) ", each)
            if starts and re.search(r"--enable-poc\b", each):
                yield page.name, each


@pytest.mark.parametrize(("page", "text"), list(documented_servers()))
def test_a_documented_server_with_proofs_is_not_refused_for_want_of_a_key(
    page: str, text: str
) -> None:
    assert any(each in text for each in SAFE), f"{page}: {text}"


def test_a_server_with_proofs_is_refused_without_a_key_on_all_addresses(checked: Checking) -> None:
    done = checked(["serve", "Qwen/Qwen3-0.6B", "--enable-poc", "--check-config"], {})
    assert done.exit_code == 2
    assert "access: FAILED" in done.stdout


def test_the_compose_file_asks_for_a_key() -> None:
    with pytest.raises(Unset, match="POC_API_KEY"):
        compose_node({})


def test_the_node_of_the_compose_file_starts(checked: Checking) -> None:
    command, given = compose_node({"POC_API_KEY": KEY})
    done = checked([*command, "--check-config"], given)
    assert done.exit_code == 0, done.output
    assert KEY not in done.output


def test_the_node_of_the_compose_file_takes_options_of_vllm(checked: Checking) -> None:
    options = "-tp 8 --served-model-name 'my model'"
    command, given = compose_node({"POC_API_KEY": KEY, "OPTIONS": options})
    assert command[-4:] == ["-tp", "8", "--served-model-name", "my model"]
    done = checked([*command, "--check-config"], given)
    assert done.exit_code == 0, done.output


def test_the_node_of_the_unit_starts_with_its_example_variables(checked: Checking) -> None:
    command, given = unit_command("ExecStartPre")
    assert command == [*unit_command("ExecStart")[0], "--check-config"]
    done = checked(command, given)
    assert done.exit_code == 0, done.output


def test_a_member_of_kubernetes_starts(checked: Checking) -> None:
    values = {"MODEL": "Qwen/Qwen3-0.6B", "POD_NAME": "members-0"}
    words = command(workloads(written())["members"], values)
    words = [word for word in words if not word.startswith("--port=")]
    words[words.index("--poc-outbox=/data/outbox.sqlite")] = "--poc-outbox=outbox.sqlite"
    given = {"POC_API_KEY": KEY, "POC_CALLBACK_SECRET": KEY, "POC_FLEET_KEY": KEY}
    done = checked([*words, "--check-config"], given)
    assert done.exit_code == 0, done.output
    assert KEY not in done.output


def test_the_check_fails_where_the_server_would_not_start(checked: Checking) -> None:
    command, given = unit_command("ExecStart")
    done = checked(
        [*command, "--poc-callback-allow", "everywhere", "--no-such-option", "--check-config"],
        {**given, "POC_API_KEY": ""},
    )
    assert done.exit_code == 2
    failed = [line.split(":")[0] for line in done.stdout.splitlines() if "FAILED" in line]
    assert failed == ["access", "callbacks", "vLLM options"]
