"""What ``bench receipts`` makes of two servers, as stubs."""

from dataclasses import replace
from typing import Any

import pytest

from proofserve.remote.node_client import NodeClient
from proofserve.reports import Figure, NodeError, Progress
from proofserve_lab import nodes
from proofserve_lab.bench.receipts import ReceiptsPlan, bench_receipts, receipt_figures
from proofserve_lab.nodes import receipts_of
from support.stub_node import Habits, stub_node

PLAN = ReceiptsPlan("stub", 0.97)
# Tokens a second of a stub: a chat takes it about 0.1 s.
SPEED = 400.0
SPEEDS = [(100.0, 98.0), (50.0, 49.0), (200.0, 100.0)]


def figures(**changes: Any) -> dict[str, Figure]:
    found = {"speeds": SPEEDS, "changed": 0, "missing": 0, "errors": []} | changes
    return {figure.name: figure for figure in receipt_figures(PLAN, **found)}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, []),
        ({"speeds": [(100.0, 97.1)]}, []),
        ({"speeds": [(100.0, 96.9)]}, ["throughput_ratio"]),
        ({"speeds": [(100.0, 98.0), (0.0, 98.0)]}, ["throughput_ratio"]),
        ({"changed": 1}, ["differing"]),
        ({"missing": 1}, ["missing"]),
        ({"errors": ["503"]}, ["errors"]),
    ],
)
def test_each_limit_is_watched(changes: dict[str, Any], names: list[str]) -> None:
    found = figures(**changes).values()
    assert [figure.name for figure in found if figure.passed is False] == names


def test_the_ratio_is_that_of_turns_side_by_side() -> None:
    # One pair in which the machine stood still does not decide it.
    found = figures()
    assert found["throughput_ratio"].value == pytest.approx(0.98)
    assert str(found["throughput_ratio"].limit) == ">= 0.97"
    assert found["tokens_per_second_on"].value == 98.0


@pytest.mark.parametrize(
    ("habits", "names"),
    [
        (Habits(chat_tokens=SPEED), []),
        (Habits(chat_tokens=SPEED / 6), ["throughput_ratio"]),
        (Habits(chat_tokens=SPEED, suffix="!"), ["differing"]),
        (Habits(chat_tokens=SPEED, receipts=False), ["missing"]),
        (Habits(chat_tokens=SPEED, finish_reason="abort"), ["differing", "errors"]),
    ],
    ids=["costs nothing", "slows chat down", "changes answers", "keeps none", "aborts"],
)
def test_a_whole_run_with_receipts_on_a_server_of_this_habit(
    habits: Habits, names: list[str]
) -> None:
    # A turn this short tells a speed only roughly.
    plan = replace(PLAN, least_ratio=0.4, clients=3, tokens=8, chats=9, pairs=3, answers=3)
    with (
        stub_node(Habits(chat_tokens=SPEED, receipts=False)) as (_, plain),
        stub_node(habits) as (_, kept),
        NodeClient(plain) as off,
        NodeClient(kept) as on,
    ):
        found = bench_receipts(off, on, plan, Progress()).json()
    assert found["failed"] == names
    assert len(found["windows"]["off_tokens_per_second"]) == 3


def test_a_receipt_that_the_log_does_not_have_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "POLL_S", 0.01)
    with stub_node() as (stub, url), NodeClient(url) as node:
        stub.unlogged.add("chatcmpl-7")
        assert receipts_of(node, "chatcmpl-7") == 1
        assert stub.unlogged == set()


def test_a_server_that_cannot_tell_of_receipts_is_an_error_and_not_a_missing_receipt() -> None:
    with NodeClient("http://127.0.0.1:9") as node, pytest.raises(NodeError):
        receipts_of(node, "chatcmpl-1")
