import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from proofserve.reports import Progress
from proofserve.verifier.audit.audit import AuditOptions, ConvictionRule, audit
from proofserve.verifier.audit.report import COLUMNS, TESTS, AuditReport, page, verdict_of
from verifier.toy_deployment import PRIVATE, ToyDeployment


@pytest.fixture(scope="module")
def text(report: AuditReport) -> str:
    return page(report)


OPTIONS = AuditOptions(ConvictionRule(max_nonces=200), 32, runs=300)


def made(deployment: ToyDeployment) -> AuditReport:
    found = audit(deployment, OPTIONS, Progress())
    setup = {"model": "<b>small</b>", "seq_len": 256}
    return AuditReport(found, deployment.price, setup, {"cores": 2})


@pytest.fixture(scope="module")
def report() -> AuditReport:
    # One of the suspects has no vector: its row has no distance and no cosine.
    return made(ToyDeployment(silent=["int4 g128"], apart={PRIVATE: 0.0}))


def test_the_table_has_a_row_for_each_and_no_cell_is_cut(report: AuditReport) -> None:
    console = Console(width=120, record=True)
    console.print(report.table())
    lines = console.export_text().splitlines()
    for found in report.audit.attacks:
        (line,) = (e for e in lines if e.strip().startswith(found.measurement.name + "  "))
        assert line.rstrip().endswith(verdict_of(found))
        assert f" {found.measurement.mean:.4f} " in line
    (skipped,) = (each for each in lines if each.strip().startswith("model skipped"))
    assert " 3/3 " in skipped
    (own,) = (each for each in lines if each.strip().startswith("as deployed "))
    assert own.rstrip().endswith("honest")


def test_a_terminal_of_80_columns_cuts_names_only(report: AuditReport) -> None:
    console = Console(width=80, record=True)
    console.print(report.table())
    text = console.export_text()
    assert "…" not in text
    said = sum(text.count(word) for word in ("CAUGHT", "EXACT", "NO VERDICT"))
    assert said >= len(report.audit.attacks)
    for test in (*TESTS, "verify"):
        assert test in text


def test_what_is_missed_comes_with_how_near_it_is(report: AuditReport) -> None:
    first, *others = report.missed
    assert re.fullmatch(
        rf"{PRIVATE}: 0\.98 times as far as an honest node, cosine -?0\.\d\d with"
        r" int. \S+( channel)?\. Of the verifications 0\.0% "
        r"convict it, 100\.0% clear it, and 0\.0% find that nothing"
        r" explains it\.",
        first,
    )
    assert all(sentence.startswith("honest on 9") for sentence in others)


def test_what_a_verification_clears_is_said(report: AuditReport) -> None:
    assert f"{PRIVATE} (100%)" in report.cleared_first
    assert "model skipped" not in report.cleared_first
    assert re.match(
        r"The honest prover that takes longest \(.*\) is cleared by \d+ nonces \(median\)",
        report.honest_cleared,
    )


def test_the_rule_says_what_is_honest(report: AuditReport) -> None:
    assert "Honest are 2 kernels: a node is convicted only if its errors" in report.rule
    assert "It is cleared if its errors have the footprint of the deployed kernel" in report.rule
    assert f"further than {report.audit.dist_threshold:.4g}" in report.rule


def test_the_json_says_it_all(report: AuditReport) -> None:
    record = json.loads(json.dumps(report.json(), allow_nan=False))
    assert record["passed"] is False
    assert record["verdict"].startswith(f"NOT CAUGHT within 200 nonces: {PRIVATE}")
    assert record["rule"]["dist_threshold"] == report.audit.dist_threshold
    assert record["suspects"] == ["int8 per channel", "int4 g128"]
    assert record["populations"] == ["as deployed", "another kernel"]
    assert [each["convicted"] for each in record["honest"]] == [0.0, 0.0, 0.0]
    attacks = {each["name"]: each for each in record["attacks"]}
    first = attacks["int8 per channel"]
    assert first["caught"] is True
    assert first["nonces"]["direction"]["median"] == first["nonces"]["verify"]["median"] < 10
    assert first["cosines"][0] > 0.5
    assert len(first["distances"]) == 32
    silent = attacks["int4 g128"]
    assert silent["distances"] == [None] * 32
    assert silent["cosines"] is None
    assert silent["count"]["fixed_nonces"] == 7
    mixture = record["attacks"][-1]
    assert mixture["distances"] is None
    assert mixture["cleared"] > 0.5
    assert 0 < record["exact_shortcuts"]["first_projections"] < 1 / 12
    assert record["exact_shortcuts"]["unread_mlp"] == 0.0


def test_another_routing_stands_beside_and_decides_nothing(report: AuditReport) -> None:
    # Under the other routing nothing shows this attack.
    hidden = ToyDeployment(apart={"int4 g128": 0.0})
    other = audit(hidden, replace(OPTIONS, only={"int4 g128"}), Progress())
    both = replace(report, beside={"sketch-v1": other})
    *rows, own, last = both.rows
    assert rows == report.rows
    assert (own[0], own[-1]) == ("as deployed, sketch-v1", "honest")
    assert (last[0], last[-1]) == ("int4 g128, sketch-v1", "NOT CAUGHT")
    assert both.routing.startswith(
        "Rows that end in sketch-v1 show the same with experts that the routers"
    )
    record = both.json()
    assert [each["name"] for each in record["beside"]["sketch-v1"]] == ["as deployed", "int4 g128"]
    assert (record["verdict"], report.json()["beside"]) == (report.audit.verdict, {})
    assert both.routing in page(both)


def test_shortcuts_are_those_of_the_scheme(report: AuditReport) -> None:
    assert "queries, keys and values depend on the token alone" in report.shortcuts
    other = made(ToyDeployment(every_position=False))
    assert f"{other.price.unread_mlp:.1%} of a whole forward" in other.shortcuts
    assert other.json()["exact_shortcuts"]["first_projections"] == 0.0


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
    audit = report.audit
    assert found.tags.count("svg") == 2
    # Inside a picture "#id" refers to the picture itself.
    assert not [link for link in found.links if not link.startswith("#")]
    assert found.tags.count("th") == len(COLUMNS) + 1 + len(audit.suspects)
    provers = [*audit.honest, *audit.attacks]
    with_cosines = [each for each in provers if each.mean_cosines is not None]
    assert len(with_cosines) < len(provers)
    assert found.tags.count("tr") == 2 + len(provers) + len(with_cosines)
    assert audit.verdict in text
    for sentence in report.missed:
        assert sentence in text
    assert len(text) < 2_000_000


def test_a_cosine_has_the_colour_of_its_size(report: AuditReport, text: str) -> None:
    (own,) = (
        each.mean_cosines[0]
        for each in report.audit.attacks
        if each.measurement.name == "int8 per channel" and each.mean_cosines
    )
    assert f'background: rgba(180, 35, 24, {own:.2f})">{own:.2f}' in text


def test_a_name_is_no_markup(text: str) -> None:
    assert "<b>small</b>" not in text
    assert "&lt;b&gt;small&lt;/b&gt;" in text


def test_the_pictures_show_every_prover_that_was_measured(report: AuditReport, text: str) -> None:
    # Matplotlib leaves each text as a comment beside its outline.
    comments = re.findall(r"<!-- (.*?) -->", text)
    for found in (*report.audit.honest, *report.audit.attacks):
        shown = found.measurement.name in comments
        assert shown is (found.measurement.chances is None), found.measurement.name
    assert "nonces" in comments
