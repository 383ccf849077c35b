from dataclasses import replace
from typing import Any

import pytest

from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.reports import Progress, Report
from proofserve.rounds.status import EngineGauges
from proofserve_lab.bench import chat as module
from proofserve_lab.bench.chat import Load, Saturation, bench_chat, chat_figures, compare_answers
from proofserve_lab.chats import Reply
from support.stub_node import Habits, stub_node

SATURATION = Saturation([100.0], [98.5], [0.97], proofs_afterwards=32)
ENGINE = EngineGauges(9, 1.0, 1.0, 0.1, 0.1, 1.02, (1.0, 9.0, 30.0), 0, 10, 0)


def said(changed: int = 0) -> list[Reply]:
    """200 answers of a run, of which so many are not as usual."""
    return [Reply(("other" if i < changed else "usual",), 1, 1, 0.0, 0.1) for i in range(200)]


def report(
    one_round: int = 0,
    eight_round: int = 4,
    errors: tuple[str, ...] = (),
    saturation: Saturation = SATURATION,
    engine: EngineGauges = ENGINE,
) -> dict[str, Any]:
    """The report of a node whose rounds change so many answers, one at a time and eight."""
    runs = (said(), said(one_round)), [said(), said(4), said()], [said(eight_round)]
    answers, _ = compare_answers(*runs)
    figures, windows = chat_figures(answers, errors, saturation, engine)
    return Report("chat-priority", figures, {}, windows, {}).json()


def failures(**changes: Any) -> list[str]:
    failed: list[str] = report(**changes)["failed"]
    return failed


def test_everything_just_within_its_limit_passes() -> None:
    assert failures() == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("identical", {"one_round": 1}),
        ("differing_with_proofs", {"eight_round": 5}),
        ("errors", {"errors": ("503",)}),
        ("errors", {"saturation": replace(SATURATION, errors=["finish_reason abort"])}),
        ("throughput_ratio", {"saturation": replace(SATURATION, beside_round=[97.9])}),
        ("throughput_ratio", {"saturation": replace(SATURATION, plain=[], beside_round=[])}),
        ("proofs_while_saturated", {"saturation": replace(SATURATION, proofs_while_saturated=1)}),
        ("proofs_afterwards", {"saturation": replace(SATURATION, proofs_afterwards=0)}),
        ("extra_wait_max_batches", {"engine": replace(ENGINE, longest_chat_wait_batches=1.06)}),
        ("resume_ms_p50", {"engine": replace(ENGINE, resume_ms=(1.0, 10.1, 30.0))}),
        ("resume_ms_p50", {"engine": replace(ENGINE, resume_ms=())}),
    ],
)
def test_each_limit_is_watched(name: str, changes: dict[str, Any]) -> None:
    assert failures(**changes) == [name]


def test_the_json_has_the_figures_by_name() -> None:
    found = report()
    assert found["identical"] == found["chats"] == 200
    assert found["resume_ms_p50"] == 9.0
    assert found["extra_wait_max_batches"] == 1.02
    assert found["throughput_ratio"] == pytest.approx(0.985)
    assert found["passed"] is True


@pytest.mark.parametrize(
    ("habits", "failed"),
    [
        (Habits(), []),
        (Habits(truthful=False), ["identical", "differing_with_proofs"]),
        (Habits(polite=False), ["proofs_while_saturated"]),
        (Habits(finish_reason="abort"), ["identical", "errors"]),
    ],
    ids=["good", "answers change", "does not give way", "aborts"],
)
def test_a_whole_run_against_a_node_with_this_habit(
    habits: Habits, failed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.2)
    # One window each way does not tell what is usual, and a test machine may be busy.
    monkeypatch.setattr(module, "STALL", 1_000.0)
    load = Load(clients=4, words=1000, window_s=0.3, pairs=1)
    with stub_node(habits) as (_, url), NodeClient(url) as node:
        found = bench_chat(node, Work("stub"), 4, 4, load, Progress()).json()
    # A window this short does not tell one speed from another.
    assert [name for name in found["failed"] if name != "throughput_ratio"] == failed
