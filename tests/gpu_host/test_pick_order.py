"""Which order a device gives: each rule is recognised, and the processor's own is found."""

import json
from pathlib import Path

import pytest
import torch

from gpu import pick_order
from gpu.pick_order import OURS, RULES, Comparison, compare, seeds_of
from proofserve.protocol.network_schemes import pick, pick_by_score

CPU = torch.device("cpu")
HIDDEN, K, ROWS = 256, 12, 20


def seen(order: torch.Tensor) -> Comparison:
    found = Comparison()
    compare(found, seeds_of(ROWS, K, 0), HIDDEN, K, order)
    return found


def by_score() -> torch.Tensor:
    return pick_by_score(seeds_of(ROWS, K, 0), HIDDEN, K, CPU)


def test_our_order_is_recognised() -> None:
    found = seen(pick(seeds_of(ROWS, K, 0), HIDDEN, K, CPU))
    assert found.follow[OURS] == found.rows == ROWS
    assert found.corrected == OURS
    assert found.examples == []


@pytest.mark.parametrize("name", RULES)
def test_every_other_rule_is_recognised_and_shown(name: str) -> None:
    found = seen(RULES[name](by_score()))
    assert found.corrected == name
    # The k-th may happen to have the largest index.
    assert found.follow[OURS] < ROWS // 2
    assert found.other_sets == 0
    assert len(found.examples) == 5
    example = found.examples[0]
    scored = pick_by_score([example["seed"]], HIDDEN, K, CPU)
    assert example["by_score"] == scored[0].tolist()
    assert example["device"] == RULES[name](scored)[0].tolist()


def test_rows_of_several_rules_have_no_corrected_order() -> None:
    order = by_score()
    order[0] = RULES["by index"](order)[0]
    assert seen(order).corrected is None


def test_other_dimensions_are_counted() -> None:
    order = by_score()
    order[3, 0] = next(i for i in range(HIDDEN) if i not in order[3])
    found = seen(order)
    assert found.other_sets == 1
    assert found.corrected is None


def test_the_network_s_scores_are_the_hashes_that_pick_orders_by() -> None:
    seeds = seeds_of(ROWS, K, 0)
    scores = pick_order.scores_of(seeds, HIDDEN, CPU)
    assert int(scores.min()) >= 0
    assert int(scores.max()) < 2**32
    assert torch.equal(scores.argsort(dim=1)[:, :K], by_score())


def test_the_processor_s_order_is_by_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    # There torch sorts the result while 64 * k is at most the hidden size.
    monkeypatch.setattr(pick_order, "HIDDEN_SIZES", (1024, 2048))
    monkeypatch.setattr(pick_order, "K_DIMS", (2, 12))
    monkeypatch.setattr("sys.argv", ["", "--device", "cpu", "--rows", "32", "--json", str(file)])
    assert pick_order.main() == 1
    found = json.loads(file.read_text())
    assert found["failed"] == ["in_another_order"]
    assert found["other_dimensions"] == found["not_repeatable"] == 0
    assert 0 < found["in_another_order"] < found["rows"]
    assert found["windows"]["corrected_order"] == "by score"
    assert found["windows"]["follow"]["by score"] == found["rows"]
    assert {shape["alone"] for shape in found["windows"]["shapes"]} == {True, False}
    assert "all follow: by score" in capsys.readouterr().out
