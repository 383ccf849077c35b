"""The table of families and formats: its rows and its page. No server is started here."""

from dataclasses import replace
from pathlib import Path

import pytest

from families.__main__ import PAGE
from families.candidates import CANDIDATES, FAMILIES, FORMATS, Candidate
from families.page import page, wrong
from families.results import MEASURED, Judged, Row, Winners
from families.trial import ONE, TWO
from measuring.results import Kept
from proofserve.engines.checkpoints import weights_digest
from proofserve.engines.reference.network import load
from proofserve.engines.vllm.support import TRIED_MODELS
from proofserve.models.architectures import ARCHITECTURES
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve_lab.check.checks import Check
from support.quantised import NEEDS_AMX, SERVED

HONEST, FRAUD = str(SequentialResult.HONEST), str(SequentialResult.FRAUD)
CHEAT = CANDIDATES["qwen3"].cheat


def judged(node: str, verdict: str) -> Judged:
    return Judged(node, verdict, 10, 1.02, 0.0123, 0.0234, "torch")


def row(name: str = "qwen3", cheat: str = CHEAT, verdict: str = FRAUD) -> Row:
    steps = ("smoke", "e2e", "coexist", "chat", "receipts")
    return Row(
        name,
        "0.32.0",
        "2 cores of a test",
        dict.fromkeys(steps, 1.0),
        {step: [Check("a check", True, "as it should be")] for step in steps},
        [judged(ONE, HONEST), judged(TWO, HONEST), judged(cheat, verdict)],
        [Winners(cheat, 60, 64, True), Winners(TWO, 0, 64, False)],
    )


def test_a_model_that_was_tried_is_known_to_the_server() -> None:
    proving = [each for each in FAMILIES.values() if not each.refused]
    assert {ARCHITECTURES[each.arch].class_name for each in proving} == TRIED_MODELS
    assert {each.form for each in FORMATS.values() if each.form} == {*SERVED, *NEEDS_AMX}


def test_a_row_is_read_back(tmp_path: Path) -> None:
    kept = Kept(Row, tmp_path)
    kept.write("qwen3", row())
    assert kept.read("qwen3") == row()


def test_the_page_has_every_row_and_every_reason() -> None:
    text = page({"qwen3": row(), "AWQ": row("AWQ")})
    for name, each in CANDIDATES.items():
        assert f"| {name} | {each.like} |" in text
        if name not in {"qwen3", "AWQ"}:
            assert f"\n- {name}: " in text
    (line,) = (line for line in text.splitlines() if line.startswith("| qwen3 |"))
    assert "| all | cleared, 10 | cleared, 10 | convicted, 10 |" in line
    assert "| 60, 0 | 0.0123, 0.0123 |" in line
    assert "0.0123 (1.02), 0.0123 (1.02)" in text


def test_what_went_wrong_is_told() -> None:
    candidate = CANDIDATES["qwen3"]
    assert wrong(candidate, row()) == []
    assert wrong(candidate, None) == ["qwen3: not run"]
    failed = row(verdict=HONEST)
    failed.checks["e2e"].append(Check("it restarts", False, "it did not"))
    failed.errors["coexist"] = "the server ended"
    assert wrong(candidate, failed) == [
        "qwen3: coexist ended: the server ended",
        "qwen3: e2e: it restarts: it did not",
        f"qwen3: {CHEAT}: {HONEST} after 10 nonces",
    ]
    text = page({"qwen3": failed})
    assert "| all but e2e, coexist |" in text


def test_a_cache_that_does_not_show_is_a_finding() -> None:
    candidate = CANDIDATES["KV cache in fp8, undeclared"]
    quiet = row(candidate.name, candidate.cheat, str(SequentialResult.UNDECIDED))
    assert wrong(candidate, quiet) == []


@pytest.mark.parametrize("form", [None, "AWQ"])
def test_a_cheat_says_the_published_digest(form: str | None, tmp_path: Path) -> None:
    candidate = Candidate("a", "b", "qwen3", form)
    honest = candidate.honest(tmp_path)
    cheat = candidate.cheating(honest, tmp_path)
    assert load(cheat, "float32", "cpu").facts == load(honest.folder, "float32", "cpu").facts
    assert (cheat / "model.safetensors").read_bytes() != (
        honest.folder / "model.safetensors"
    ).read_bytes()
    with_cache = replace(candidate, cheat="KV cache in fp8")
    assert with_cache.cheating(honest, tmp_path) == honest.folder
    assert weights_digest(honest.folder) == weights_digest(cheat)


def test_the_page_is_of_the_results_that_are_kept() -> None:
    found = MEASURED.all(CANDIDATES)
    if not found:
        pytest.skip("tools/families/measured has no results yet: `make models` writes them")
    assert PAGE.read_text() == page(found)
