"""The open benchmark in short form: its files, what is judged, and its page."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from proofserve.reports import ReportedError
from real_gpus import __main__ as command
from real_gpus.deployments import FOLDER, Group, groups, read
from real_gpus.page import PARTS, convicted_honest, deployments_csv, page, verdicts_csv
from real_gpus.trying import NEVER, Endings, Kind, by_the_network, judged, together
from support.stub_node import stub_node

ORDERS = 5


@pytest.fixture(scope="module")
def known() -> dict[str, Group]:
    return {f"{each.model} {each.block_hash}": each for each in groups([FOLDER])}


def minimax(known: dict[str, Group]) -> Group:
    (found,) = (each for each in known.values() if each.model == "MiniMax-M2.7")
    return found


def some_of(group: Group, names: list[str]) -> Group:
    """With fewer deployments."""
    places = [i for i, each in enumerate(group.deployments) if each.name in names]
    kept = tuple(group.deployments[i] for i in places)
    return replace(group, deployments=kept, vectors=group.vectors[places])


def test_every_file_is_read_and_says_what_it_is(known: dict[str, Group]) -> None:
    assert sum(len(each.deployments) for each in known.values()) == len([*FOLDER.glob("*.json")])
    for group in known.values():
        assert np.isfinite(group.vectors).all()
        assert len(group.honest) >= 3
        for each in group.deployments:
            assert each.card
            assert "Apache-2.0" in each.facts.source


def test_honest_ones_are_not_convicted_and_four_bits_are(known: dict[str, Group]) -> None:
    of = ("4xa100", "4xh100", "2xh200", "2xb200")
    names = [*(f"05-minimax-m27-fp8-{each}" for each in of), "04-minimax-m27-awq4bit-2xb200"]
    group = some_of(minimax(known), [*names, "04-minimax-m27-awq4bit-2xh100"])
    found = judged(group, ORDERS, 64)
    honest = [of for kind, of in found.items() if not kind.cheap]
    cheap = [of for kind, of in found.items() if kind.cheap and kind.share == 1.0]
    assert honest
    assert all((each == NEVER).all() for of in honest for each in of.convicted)
    assert all(of.share(of.convicted, 64) > 0.9 for of in cheap)
    assert all((each == NEVER).all() for of in cheap for each in of.cleared)
    by_suspect = [of for kind, of in found.items() if kind.cheap and kind.suspect]
    assert all(of.share(of.cleared, 64) < 0.5 for of in by_suspect)


def test_the_networks_rule_convicts_honest_cards(known: dict[str, Group]) -> None:
    assert by_the_network(minimax(known)) == (10, 72, 27, 27)


def test_the_page_has_a_line_for_each_kind_and_names_who_was_convicted(
    known: dict[str, Group],
) -> None:
    group = next(each for each in known.values() if each.block_hash == "TEST_BLOCK")
    kinds = together([judged(group, 1, 64, seed) for seed in range(PARTS)])
    (kind,) = kinds
    text = page([(group, kinds)], PARTS, 64, "a machine")
    assert "| honest, FP8 | 1 kind of card | none | 0.00% |" in text
    (head, row) = verdicts_csv([(group, kinds)]).splitlines()
    assert head.startswith("model,judged,references on,")
    assert row.startswith(f'{group.model},"honest, FP8",1 kind of card,none,0.00%,')
    assert f",{len(kinds[kind].nodes) // PARTS}," in row
    assert convicted_honest([(group, kinds)]) == []
    wrong = Endings([np.array([9])], [np.array([NEVER])], ["a node"])
    assert convicted_honest([(group, {kind: wrong})]) == [f"{group.model}: a node was convicted"]
    assert convicted_honest([(group, {replace(kind, cheap=True): wrong})]) == []


def test_the_table_of_deployments_is_computed(known: dict[str, Group]) -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert deployments_csv([*known.values()]) == (docs / "real-gpus-deployments.csv").read_text()


def test_a_file_that_does_not_say_what_it_is_is_named(tmp_path: Path) -> None:
    body = json.loads((FOLDER / "05-minimax-m27-fp8-4xh100.json").read_text())
    del body["deployment"]["honest"]
    (tmp_path / "mine.json").write_text(json.dumps(body))
    with pytest.raises(ReportedError, match=r"mine\.json.*deployment\.honest"):
        read(tmp_path / "mine.json")
    with pytest.raises(ReportedError, match="no deployment in"):
        groups([tmp_path / "nowhere"])


def test_a_node_is_recorded_beside_a_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = "05-minimax-m27-fp8-4xh100"
    (tmp_path / f"{like}.json").write_bytes((FOLDER / f"{like}.json").read_bytes())
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    what = ("--like", like, "--weights", "FP8", "--source", "us (MIT)", "--nonces", "40")
    with stub_node() as (_, url):
        asked = ["record", url, *what, "--name", "mine"]
        result = CliRunner().invoke(command.app, asked)
        assert result.exit_code == 0, result.output
        again = CliRunner().invoke(command.app, asked)
    assert again.exit_code == 2
    assert "mine.json exists; give --name" in again.output.replace("\n", "")
    (group,) = groups([tmp_path])
    assert {each.name for each in group.deployments} == {like, "mine"}
    assert group.vectors.shape == (2, 40, 12)


def test_kinds_are_listed_honest_first() -> None:
    honest, cheap = Kind(False, "FP8", 3, ""), Kind(True, "AWQ", 3, "")
    assert sorted([cheap, honest]) == [honest, cheap]
