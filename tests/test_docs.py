"""The documents list what the code has: options, errors and metrics, no more and no less."""

import asyncio
import re
from pathlib import Path

import click
import pytest
from typer.main import get_command

from proofserve.cli.main import app
from proofserve.cli.serve import NODE_OPTIONS
from proofserve.gateway import failures
from proofserve.gateway.failures import Failure
from proofserve.gateway.gateway import Gateway
from proofserve.gateway.records import BackendSpec, GatewayPlan
from proofserve.settings.fleet import FleetSettings
from proofserve.settings.gateway import PREFIX, GatewaySettings

ROOT = Path(__file__).parent.parent
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
GATEWAY = (ROOT / "docs" / "gateway.md").read_text()


def rows(heading: str, page: str = GATEWAY) -> list[list[str]]:
    """The cells of the table under a heading, its own two lines left out."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ", maxsplit=1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def shown(default: object) -> str:
    """A default as a person writes it."""
    if default is None:
        return ""
    if isinstance(default, tuple):
        return ",".join(default)
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_every_option_with_its_default_and_variable() -> None:
    fields = GatewaySettings.model_fields.items()
    expected = [[f"`--{name.replace('_', '-')}`", shown(field.default)] for name, field in fields]
    assert [row[:2] for row in rows("Options and variables")] == expected
    assert PREFIX == "VLLM_"


def test_every_option_of_a_node_with_its_default() -> None:
    expected = [
        [f"`{NODE_OPTIONS.flag(name)}`", shown(each.default)]
        for name, each in NODE_OPTIONS.fields.items()
    ]
    table = rows("Options and variables", (ROOT / "docs" / "operations.md").read_text())
    assert [row[:2] for row in table[: len(expected)]] == expected


def test_the_page_says_how_an_option_of_a_node_is_spelled_as_a_variable() -> None:
    for name in NODE_OPTIONS.fields:
        spelled = NODE_OPTIONS.flag(name).removeprefix("--").removeprefix("poc-")
        spelled = {"enable-poc": "enabled"}.get(spelled, spelled).replace("-", "_").upper()
        assert NODE_OPTIONS.variable(name) == f"POC_{spelled}"


def test_every_error_with_its_status() -> None:
    found = [each for each in vars(failures).values() if isinstance(each, Failure)]
    expected = sorted((f"`{each.code}`", str(each.status)) for each in found)
    assert sorted((row[0], row[1]) for row in rows("Errors")) == expected


def test_every_metric_with_its_labels() -> None:
    async def collected() -> dict[str, set[str]]:
        gateway = Gateway(GatewayPlan(backends=(BackendSpec("http://127.0.0.1:8001"),)))
        gateway.totals.outcomes["client", "ok"] += 1
        gateway.totals.retries["reason"] += 1
        assert gateway.totals.series["backend", "model"]
        return {
            f"`{metric.name}{'_total' if metric.type == 'counter' else ''}`": {
                label for sample in metric.samples for label in sample.labels if label != "le"
            }
            for metric in gateway.metrics.collect()
        }

    def labels(cell: str) -> set[str]:
        return {each.strip() for each in cell.split(",") if each.strip()}

    assert {row[0]: labels(row[1]) for row in rows("Metrics")} == asyncio.run(collected())


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_heading(page: Path) -> None:
    text = page.read_text().replace("\n", " ")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
        found = page.parent / target if target else page
        assert found.suffix != ".md" or anchor in anchors(found), f"{target}#{anchor}"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_host_that_is_named_after_a_server_has_its_default_port(page: Path) -> None:
    usual = {
        "gateway": GatewaySettings.model_fields["port"].default,
        "fleet": FleetSettings.model_fields["port"].default,
    }
    for server, port in re.findall(r"//(gateway|fleet):(\d+)", page.read_text()):
        assert int(port) == usual[server], f"{server}:{port}"


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 900


# As `wc -w` counts, the bars of tables included.
MOST_WORDS = 32_000


def test_the_pages_have_few_words() -> None:
    pages = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    assert sum(len(page.read_text().split()) for page in pages) <= MOST_WORDS


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"]({page.name})" in index or page.name == "README.md", page.name


# What the documents of the older implementations name: a user of theirs looks for these words.
OLDER_NAMES = [
    "poc_smoke_test.py",
    "poc_e2e_test.py",
    "poc_coexist_test.py",
    "poc_callback_receiver.py",
    "start_vllm_h100.sh",
    "run_vllm_gateway.py",
    "requirements-vllm.txt",
    "VLLM_USE_V1",
    "--enable-poc",
    "estimate_R_from_experiment",
    "init/generate",
    "init/validate",
    "phase/generate",
    "phase/validate",
    "use_sign_flips",
    "use_layer_hooks",
    "r_target",
    "callback_url",
    "fraud_threshold",
    "node_count",
    "n_groups",
    "VLLM_BACKEND_URL",
    "VLLM_MAX_CONCURRENT_REQUESTS",
    "VLLM_REQUEST_TIMEOUT_SECONDS",
    "VLLM_QUEUE_WAIT_TIMEOUT_SECONDS",
    "VLLM_HOST",
    "VLLM_PORT",
    "VLLM_USE_EMBEDDED_ENGINE",
    "/v1/health",
]


@pytest.mark.parametrize("name", OLDER_NAMES)
def test_the_migration_guide_has_every_older_name(name: str) -> None:
    assert name in (ROOT / "docs" / "migration.md").read_text()


COMMAND = re.compile(r"`proofserve ((?:[a-z0-9-]+ ?)+)")


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    commands = get_command(app)
    with click.Context(commands) as context:
        for text in COMMAND.findall(page.read_text()):
            first = text.split()[0]
            assert commands.get_command(context, first) is not None, text
