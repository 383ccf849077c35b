"""The committed page and README say what the committed cells do."""

import re
from pathlib import Path

import pytest

from measuring.results import table
from proofserve.protocol import ARTIFACT, SKETCH_2
from soundness import results as cells

ROOT = Path(__file__).parents[2]
ROWS = cells.read((ROOT / "docs" / "soundness.csv").read_text())
PAGE = (ROOT / "docs" / "soundness.md").read_text()
README = (ROOT / "README.md").read_text()
MIXTURES = ("trained_moe", "qwen3_moe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize(
    "text",
    [
        cells.summary(ROWS),
        table(*cells.honest_summary(ROWS)),
        table(*cells.cheat_summary(ROWS)),
        cells.never_convicted(ROWS),
        cells.forged_summary(ROWS),
    ],
    ids=["summary", "honest", "cheats", "never convicted", "forged"],
)
def test_the_page_sums_up_its_cells(text: str) -> None:
    assert text in PAGE


def test_readme_says_how_often_honest_nodes_are_convicted_and_cleared() -> None:
    honest = [row for row in ROWS if row["kind"] == cells.HONEST]
    assert {row["convicted"] for row in honest} == {"0"}
    assert "No honest node was convicted" in README
    said = re.search(r"on two ranks too, were cleared within 100 nonces in ([\d.]+) %", README)
    assert said is not None
    cleared = {
        (row["model"], row["scheme"], row["node"]): float(row["cleared_soon"])
        for row in honest
        if row["processor"] and row["form"] == "calibrated" and row["scheme"] != ARTIFACT
        # README says so beside it: only this scheme clears a mixture.
        if row["model"] not in MIXTURES or row["scheme"] == SKETCH_2
    }
    assert ("trained", "sketch-v1", "vllm-tp2") in cleared
    assert min(cleared.values()) == float(said[1])


def test_readme_says_how_often_the_weights_of_the_bank_are_cleared() -> None:
    most = re.search(r"were cleared in at most ([\d.]+) %", README)
    cache = re.search(r"SmolLM2 a KV cache in fp8 in ([\d.]+) %, on 10 % in ([\d.]+) %", README)
    assert most is not None
    assert cache is not None
    rates = {
        (row["model"], row["node"], row["share"]): float(row["cleared"])
        for row in ROWS
        if row["kind"] == cells.CHEAT and row["scheme"] != ARTIFACT
        # No suspect of the bank: README has a line of its own about it.
        if "private" not in row["node"]
    }
    of_cache = [rates.pop(("smollm2", "KV cache in fp8", share)) for share in ("30", "10")]
    assert of_cache == [float(cache[1]), float(cache[2])]
    assert max(rates.values()) == float(most[1])
