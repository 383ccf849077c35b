"""The dashboard and the alerts name what the code exposes, with labels that it has."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from api.support import serving
from fleet.servers import fleet_of
from proofserve.api.metrics import exposed
from proofserve.gateway.gateway import Gateway
from proofserve.gateway.records import BackendSpec, GatewayPlan
from proofserve.outbox.store import SqliteOutbox
from proofserve.protocol.receipts.record import SigningKey
from proofserve.rounds.receipts import ReceiptService
from proofserve.rounds.status import FORWARD_BOUNDS_S, CoreLiveness
from support.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
# A selector: a name of ours, and what stands in its braces.
SELECTOR = re.compile(r"\b((?:proofserve|gateway)_\w+)\s*(?:\{([^}]*)\})?")
# Added by Prometheus to every series.
ANYWHERE = {"job", "instance"}


async def node_series() -> dict[str, set[str]]:
    """The metrics of a node whose answers get receipts, one of them none."""
    registry = CollectorRegistry()
    with TemporaryDirectory() as folder:
        async with await SqliteOutbox.open(Path(folder) / "outbox.sqlite") as outbox:
            await outbox.receipts.add([], {"no_sketches": 1})
            receipts = ReceiptService(FakeEngine(), outbox.receipts, SigningKey.new())
            return await series_of(receipts, registry)


async def series_of(receipts: ReceiptService, registry: CollectorRegistry) -> dict[str, set[str]]:
    async with serving(receipts=receipts, liveness=lambda: (CoreLiveness(0),)) as server:
        server.node.refusals[409, "queue_full"] += 1
        with exposed(server.node, registry):
            text = await asyncio.to_thread(generate_latest, registry)
    series = labels_of(text.decode())
    # The toy engine does not time its forwards.
    assert FORWARD_BOUNDS_S
    for part in ("bucket", "sum", "count"):
        series[f"proofserve_forward_seconds_{part}"] = {"le"} if part == "bucket" else set()
    return series


async def gateway_series() -> dict[str, set[str]]:
    gateway = Gateway(GatewayPlan(backends=(BackendSpec("http://127.0.0.1:8001"),)))
    gateway.totals.outcomes["client", "ok"] += 1
    gateway.totals.retries["reason"] += 1
    assert gateway.totals.series["backend", "model"]
    found = labels_of(generate_latest(gateway.metrics).decode())
    # Shown for the keys that there are.
    found["gateway_client_in_flight"] = {"client"}
    return found


def labels_of(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    return asyncio.run(node_series()) | asyncio.run(gateway_series())


def dashboard_expressions() -> Iterator[str]:
    board = json.loads((DEPLOY / "grafana" / "proofserve.json").read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def rule_expressions() -> Iterator[str]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


async def fleet_series() -> dict[str, set[str]]:
    with TemporaryDirectory() as folder:
        async with fleet_of(Path(folder), []) as fleet:
            return labels_of((await fleet.http.get("/api/v1/fleet/metrics")).text)


@pytest.mark.parametrize("expressions", [dashboard_expressions, rule_expressions])
def test_every_selector_meets_a_series(expressions: object, series: dict[str, set[str]]) -> None:
    series = series | asyncio.run(fleet_series())
    asked = [found for text in expressions() for found in SELECTOR.findall(text)]  # type: ignore[operator]
    assert len(asked) > 10
    for name, braces in asked:
        assert name in series, name
        wanted = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", braces))
        assert wanted <= series[name] | ANYWHERE, name


def test_every_metric_is_on_the_dashboard(series: dict[str, set[str]]) -> None:
    shown = {name for text in dashboard_expressions() for name, _ in SELECTOR.findall(text)}
    # What a panel has no use for: the versions, and a number that only ever grows.
    unseen = {"proofserve_info", "proofserve_outbox_results"}
    names = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in series}
    assert names - unseen == {re.sub(r"_bucket$", "", name) for name in shown}


def test_the_dashboards_variables_exist(series: dict[str, set[str]]) -> None:
    board = json.loads((DEPLOY / "grafana" / "proofserve.json").read_text())
    queries = [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    for query in queries:
        (name,) = re.findall(r"label_values\((\w+), job\)", query["query"])
        assert name in series


def test_operations_md_lists_the_metrics_of_a_node() -> None:
    section = OPERATIONS.split("\n## Metrics\n")[1].split("\n## ")[0]
    listed = {
        name: {label.strip() for label in labels.split(",") if label.strip()}
        for name, labels in re.findall(r"^\| `(proofserve_\w+)` \|([^|]*)\|", section, re.MULTILINE)
    }
    (others,) = re.findall(r"^Without labels.*(?:\n.+)*", section, re.MULTILINE)
    listed |= {name: set[str]() for name in re.findall(r"`(proofserve_\w+)`", others)}
    exposed_names: dict[str, set[str]] = {}
    for name, labels in asyncio.run(node_series()).items():
        family = re.sub(r"_(bucket|sum|count|created)$", "", name)
        exposed_names.setdefault(family, set()).update(labels - {"le"})
    assert listed == exposed_names


def test_the_rules_pass_promtool() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; it comes with Prometheus")
    for kind, file in (("rules", RULES), ("config", DEPLOY / "prometheus" / "prometheus.yml")):
        done = subprocess.run(
            [promtool, "check", kind, str(file)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_what_to_do() -> None:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
            assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]
