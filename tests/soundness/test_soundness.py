"""``make soundness`` in its short form: one small mixture, four kernels, a cheat, and the page."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from measuring.results import Kept
from proofserve.protocol import SKETCH
from proofserve.protocol.codec import encode
from proofserve.reports import Progress, ReportedError
from proofserve.verifier.judges import BankRun
from soundness import page as pages
from soundness.recorded import README, foreign, nodes_in
from soundness.results import FORMS, Found, cell_rows, convicted_honest, read, replaced, written
from soundness.runs import KeptRuns
from soundness.subjects import SUBJECTS, Subject
from soundness.trying import RealNode, Trial, Trying, calibration_of
from support.four_bits import one_thread

# Two servers and a kernel between them, so that none is convicted by the others.
KERNELS = ("vLLM on x86 with AMX", "vLLM on a GPU", "vLLM on x86 with bfloat16", "float32")
SUSPECTS = ("int4 g128", "int8 per channel")
MIXTURE = Subject(
    "qwen3_moe", "mixture", seq_len=16, nonces=16, calibrating=64, bank=32, serves_bank=True
)
TRIAL = Trial(runs=200, most=100, runs_of_cheats=200, most_of_cheats=300)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> KeptRuns:
    return KeptRuns(MIXTURE, SKETCH, KERNELS, SUSPECTS, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def found(runs: KeptRuns) -> Found:
    with one_thread():
        calibration = calibration_of(runs, Progress(), TRIAL.runs)
        truth = runs.truth(MIXTURE.judged)
        errors = runs.errors(BankRun(kernels="vLLM on a GPU", order=5), MIXTURE.judged)
        real = RealNode("a node", "a card", {n: truth[n] + errors[n] for n in MIXTURE.judged})
        return Trying(runs, calibration, TRIAL, Progress()).found([real])


def test_no_honest_node_is_convicted_and_the_cheat_is(found: Found) -> None:
    assert [node.name for node in found.honest] == [*KERNELS, "a node"]
    for node in found.honest:
        assert set(node.cells) == set(FORMS)
        for cell in node.cells.values():
            ended = cell.cleared + cell.unexplained + cell.undecided
            assert (cell.convicted, ended) == (0, TRIAL.runs)
    for cheat in found.cheats:
        # The other suspect moves this small model less than rounding does.
        if cheat.weights == "int4 g128" or cheat.share == 1.0:
            assert cheat.cleared == 0
        assert cheat.weights != "int4 g128" or cheat.convicts_at[1] is not None


def test_what_was_computed_is_kept(runs: KeptRuns, found: Found) -> None:
    files = {file.name: file.stat().st_mtime_ns for file in runs.folder.iterdir()}
    assert found.runs == TRIAL.runs
    again = KeptRuns(MIXTURE, SKETCH, KERNELS, SUSPECTS, runs.folder.parent)
    again.errors(BankRun(kernels="float32"), MIXTURE.judged)
    assert {file.name: file.stat().st_mtime_ns for file in again.folder.iterdir()} == files


def test_the_page_says_what_was_tried_and_a_wrong_conviction(found: Found, tmp_path: Path) -> None:
    kept = Kept(Found, tmp_path)
    kept.write(found.name, found)
    assert kept.read(f"qwen3_moe-{SKETCH}") == found
    rows = cell_rows(found)
    text = pages.page(rows, TRIAL)
    assert f"**0 of {TRIAL.runs * (len(KERNELS) + 1) * len(FORMS):,}**" in text
    assert f"simulated: all {found.date} on {found.machine}." in text
    assert read(written(rows)) == rows
    (own,) = [r for r in rows if (r["node"], r["form"]) == ("a node", FORMS[0])]
    assert own["processor"] == "a card"
    assert f"| {own['cleared_soon']} |" in text
    assert convicted_honest(rows) == []
    node = found.honest[0]
    cells = {**node.cells, FORMS[0]: replace(node.cells[FORMS[0]], convicted=3)}
    wrong = replace(found, honest=(replace(node, cells=cells), *found.honest[1:]))
    # What is tried again replaces its rows alone.
    others = [row | {"model": "another"} for row in rows]
    order = [("another", SKETCH), ("qwen3_moe", SKETCH)]
    again = replaced([*rows, *others], [wrong], order)
    assert again == [*others, *cell_rows(wrong)]
    assert convicted_honest(again) == [f"qwen3_moe, {SKETCH}, calibrated: {KERNELS[0]} in 1.5 %"]


def test_a_recorded_folder_is_read_by_its_readme(runs: KeptRuns, tmp_path: Path) -> None:
    scheme = runs.work.scheme
    (text,) = encode(runs.truth((3,))[3][None])
    row = {"seq": 1, "round_id": "recorded", "nonce": 3, "vector_b64": text}
    (tmp_path / f"theirs-{SKETCH}.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ReportedError, match=r"README\.md that says what its node ran on"):
        list(nodes_in(tmp_path, scheme))
    (tmp_path / README).write_text("Processor: a card.\n")
    (node,) = nodes_in(tmp_path, scheme)
    assert (node.name, node.processor, [*node.vectors]) == ("theirs", "a card", [3])


def test_the_recorded_foreign_node_has_the_nonces_of_the_trained_model(runs: KeptRuns) -> None:
    node = foreign(runs.work.scheme)
    assert tuple(node.vectors) == SUBJECTS[0].judged
