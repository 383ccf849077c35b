import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from lab.toy_deployment import ToyDeployment
from proofserve.lab.audit.audit import audit
from proofserve.lab.audit.audit_page import page
from proofserve.lab.audit.audit_report import COLUMNS, AuditReport
from proofserve.lab.audit.conviction import ConvictionRule
from proofserve.lab.client.progress import NoProgress
from proofserve.protocol.verdict.counting import sample_size


@pytest.fixture(scope="module")
def text(report: AuditReport) -> str:
    return page(report)


@pytest.fixture(scope="module")
def report() -> AuditReport:
    deployment = ToyDeployment(apart={"8 bits": 0.03})
    found = audit(deployment, ConvictionRule(0.1), 32, NoProgress())
    setup = {"model": "<b>small</b>", "seq_len": 256}
    return AuditReport(found, deployment.price, setup, {"cores": 2})


def test_the_table_has_a_row_for_each_and_no_cell_is_cut(report: AuditReport) -> None:
    console = Console(width=100, record=True)
    console.print(report.table())
    lines = console.export_text().splitlines()
    for found in report.audit.results:
        (line,) = (each for each in lines if each.strip().startswith(found.measurement.name + " "))
        assert line.rstrip().endswith("CAUGHT")
        assert f"{found.measurement.mean:.3f} ± {found.measurement.sd:.3f}" in line
        assert (" @ 0." in line) is found.caught
    assert sum("NOT CAUGHT" in line for line in lines) == 2
    assert any(
        line.strip().startswith("honest ") and line.rstrip().endswith("honest") for line in lines
    )


def test_what_is_missed_comes_with_what_is_needed(report: AuditReport) -> None:
    assert report.missed == [
        "weights of 8 bits: 0.00% to 10.89% of the vectors mismatch."
        " Needed: a threshold below 0.03 (honest: up to 0.01).",
        "honest on 98%, else zero vectors: 1.78% to 12.67% of the vectors mismatch."
        " Needed: 2000 nonces.",
    ]


def test_the_json_says_it_all(report: AuditReport) -> None:
    record = json.loads(json.dumps(report.json(), allow_nan=False))
    assert record["passed"] is False
    assert record["verdict"].startswith("NOT CAUGHT within 1000 nonces: weights of 8 bits")
    assert record["rule"]["dist_threshold"] == 0.1
    assert record["honest"]["mismatch_rate"] == 0.0
    first, second = record["attacks"][:2]
    assert (first["caught"], first["fixed_nonces"], first["sequential"]) == (False, None, None)
    assert second["caught"] is True
    low = second["mismatch_interval"][0]
    assert second["fixed_nonces"] == sample_size(0.001, 1e-6, low, 0.999, 1000)
    assert second["sequential"]["p_fraud"] == 0.5
    assert len(second["distances"]) == 32
    assert record["attacks"][-1]["distances"] is None
    assert 0 < record["attacks"][-1]["default_sequential_convicts"] < 0.01
    shortcuts = record["exact_shortcuts"]
    assert 0 < shortcuts["unread_attention"] < shortcuts["unread_mlp"] < 1 / 12
    assert f"{shortcuts['unread_mlp']:.1%} of a whole forward" in report.shortcuts


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"src", "href"}]


def test_the_page_is_one_file_with_its_pictures(report: AuditReport, text: str) -> None:
    found = Page()
    found.feed(text)
    assert found.tags.count("svg") == 2
    # Inside a picture "#id" refers to the picture itself.
    assert not [link for link in found.links if not link.startswith("#")]
    assert found.tags.count("th") == len(COLUMNS)
    assert found.tags.count("tr") == 2 + len(report.audit.results)
    assert report.audit.verdict in text
    for sentence in report.missed:
        assert sentence in text
    assert len(text) < 2_000_000


def test_a_name_is_no_markup(text: str) -> None:
    assert "<b>small</b>" not in text
    assert "&lt;b&gt;small&lt;/b&gt;" in text


def test_the_pictures_show_every_attack_that_was_measured(report: AuditReport, text: str) -> None:
    # Matplotlib leaves each text as a comment beside its outline.
    comments = re.findall(r"<!-- (.*?) -->", text)
    for found in report.audit.results:
        shown = found.measurement.name in comments
        assert shown is (found.measurement.distances is not None), found.measurement.name
