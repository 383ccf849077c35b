"""What ``bench chat-priority --share`` makes of its windows, and a run against a stub server."""

from typing import Any

import pytest

from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.reports import Progress
from proofserve.rounds.status import EngineGauges
from proofserve_lab.bench import share as module
from proofserve_lab.bench.chat import Load, Window
from proofserve_lab.bench.share import MeasuredShare, measure_share, share_report
from proofserve_lab.chats import Stream
from support.stub_node import Habits, stub_node

WORK, LOAD = Work("stub"), Load()
WINDOW_S = 10.0


def gauges(busy_s: float, deferred_s: float) -> EngineGauges:
    return EngineGauges(1, busy_s, deferred_s, 0.1, 0.0, 0.0, (), 0, 1, 0)


def window(began: float, proofs: float = 0.0, idle: float = 0.0) -> Window:
    """``WINDOW_S`` seconds of which proofs and nobody had these fractions."""
    before = gauges(5.0, 7.0)
    chat = 1 - proofs - idle
    after = gauges(5.0 + proofs * WINDOW_S, 7.0 + chat * WINDOW_S)
    return Window(proofs > 0, began, began + WINDOW_S, before, after)


def measured(
    promised: float = 0.1,
    proofs: float = 0.1,
    loss: float = 0.1,
    idles: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0),
    error: str | None = None,
) -> MeasuredShare:
    """Four pairs of windows, beside which one stream has 100 tokens a second, less ``loss``."""
    pairs, tokens = [], []
    for number, idle in enumerate(idles):
        began = 2 * WINDOW_S * number
        pairs.append((window(began), window(began + WINDOW_S, proofs, idle)))
        tokens += [(began + 0.01 * i, 1) for i in range(1000)]
        gap = 0.01 / (1 - loss)
        count = round(1000 * (1 - loss))
        tokens += [(began + WINDOW_S + gap * i, 1) for i in range(count)]
    return MeasuredShare(promised, pairs, [Stream(tokens, error)])


def figures(*found: MeasuredShare) -> dict[str, Any]:
    return share_report(WORK, LOAD, found, {}).json()


def test_the_figures_of_each_share_have_its_number() -> None:
    read = figures(measured(), measured(promised=0.25, proofs=0.24, loss=0.2))
    assert read["failed"] == []
    assert read["proof_share_0.1"] == pytest.approx(0.1)
    assert read["proof_share_0.25"] == pytest.approx(0.24)
    assert read["share_error_0.25"] == pytest.approx(0.01)
    assert read["chat_loss_0.25"] == pytest.approx(0.2)
    assert read["tokens_per_second_0.1"] == pytest.approx(100)
    assert read["gap_ms_p50_plain_0.25"] == pytest.approx(10)
    assert read["gap_ms_p50_round_0.25"] == pytest.approx(12.5)
    assert read["limits"]["chat_loss_0.25"] == "<= 0.27"
    assert read["windows"]["0.25"]["proof_s"] == pytest.approx([2.4] * 4)


def test_the_slowest_gaps_show_in_the_99th_of_100() -> None:
    found = measured()
    found.streams[0].tokens[500:505] = []
    read = figures(found)
    assert read["gap_ms_p99_plain_0.1"] == pytest.approx(10, rel=0.01)
    for start in range(0, 120, 2):
        found.streams[0].tokens[start : start + 1] = []
    assert figures(found)["gap_ms_p99_plain_0.1"] == pytest.approx(20, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({"proofs": 0.119}, []),
        ({"proofs": 0.121}, ["share_error_0.1"]),
        ({"proofs": 0.079}, ["share_error_0.1"]),
        ({"loss": 0.118}, []),
        ({"loss": 0.122}, ["chat_loss_0.1"]),
        ({"error": "503"}, ["errors_0.1"]),
        ({"idles": (0.0, 0.11, 0.0, 0.0)}, []),
        ({"idles": (0.2, 0.2, 0.0, 0.0)}, ["left_out_0.1"]),
        ({"idles": (0.2, 0.2, 0.2, 0.2)}, ["share_error_0.1", "chat_loss_0.1", "left_out_0.1"]),
    ],
)
def test_each_limit_is_watched(changes: dict[str, Any], failed: list[str]) -> None:
    assert figures(measured(**changes))["failed"] == failed


def test_a_window_in_which_chat_paused_counts_in_no_figure() -> None:
    found = measured(idles=(0.0, 0.0, 0.0, 0.5))
    read = figures(found)
    assert read["proof_share_0.1"] == pytest.approx(0.1)
    assert read["left_out_0.1"] == 1
    assert read["idle_0.1"] == pytest.approx(0.0)


def test_without_tokens_there_is_no_loss_and_the_limit_is_broken() -> None:
    silent = MeasuredShare(0.1, measured().pairs, [Stream()])
    assert silent.loss is None
    assert "chat_loss_0.1" in figures(silent)["failed"]


@pytest.mark.parametrize(
    ("habits", "failed"),
    [
        (Habits(share=0.5, loss=0.5), set()),
        (Habits(share=0.9, loss=0.5), {"share_error_0.5"}),
        (Habits(share=0.5, loss=0.9), {"chat_loss_0.5"}),
        (Habits(share=0.5, loss=0.5, finish_reason="abort"), {"errors_0.5"}),
    ],
    ids=["keeps its share", "takes more", "slows chat down", "aborts"],
)
def test_a_whole_run_against_a_node_with_this_habit(
    habits: Habits, failed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failed_of_a_run(habits, monkeypatch)[1] == failed


def test_a_node_that_is_idle_has_its_windows_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found, failed = failed_of_a_run(Habits(share=0.5, idle=0.45), monkeypatch)
    # On a busy machine a window may be short of idle time. What is measured then is right.
    nothing_measured = {"share_error_0.5", "chat_loss_0.5"} if not found.counted else set()
    assert failed == {"left_out_0.5"} | nothing_measured


def failed_of_a_run(
    habits: Habits, monkeypatch: pytest.MonkeyPatch
) -> tuple[MeasuredShare, set[str]]:
    """A whole run against such a node, and the limits that it breaks."""
    monkeypatch.setattr(module, "SETTLE_S", 0.1)
    monkeypatch.setattr(module, "SPREAD_S", 0.1)
    # Windows this short tell a speed only roughly, and the instant of an answer too.
    for name, limit in (("TOLERANCE", 0.2), ("IDLE", 0.3), ("TOLERATED", 0.5)):
        monkeypatch.setattr(module, name, limit)
    load = Load(clients=4, words=20, window_s=0.5, pairs=3)
    with stub_node(habits) as (stub, url), NodeClient(url) as node:
        found = measure_share(node, 0.5, WORK, load, Progress())
    assert stub.rounds == 3
    assert stub.state == "STOPPED"
    return found, set(share_report(WORK, load, [found], {}).json()["failed"])
