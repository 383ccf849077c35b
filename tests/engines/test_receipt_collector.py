"""How ended answers and their rows leave the engine core."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import pytest

from proofserve.engines.receipts import collector as module
from proofserve.engines.receipts.client import response_of
from proofserve.engines.receipts.collector import COLLECT_S, AnswerCollector
from proofserve.engines.receipts.compat_answers import EndedAnswer
from proofserve.engines.receipts.tap import Rows, Wanted
from proofserve.protocol.receipts.record import Sampling


class Core:
    """A ``WatchedCore`` on a fake clock, whose loop is idle when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked: list[tuple[list[str], list[str]]] = []
        self.error: Exception | None = None
        self._idle: list[Callable[[], None]] = []

    def call_when_idle(self, callback: Callable[[], None]) -> None:
        self._idle.append(callback)

    def idle(self) -> None:
        while self._idle:
            self._idle.pop()()

    def unfinished(self) -> list[str]:
        return ["running"]

    def fetch_rows(self, wanted: Sequence[Wanted], alive: Sequence[str]) -> Callable[[], Rows]:
        self.asked.append(([each.request_id for each in wanted], list(alive)))

        def read() -> Rows:
            if self.error is not None:
                raise self.error
            return [each.request_id.encode() for each in wanted]

        return read


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def collector(core: Core) -> AnswerCollector:
    return AnswerCollector(core, lambda: core.now)


def answer(name: str, sketches: bytes | None = None) -> EndedAnswer:
    ids, tokens = (name, f"chatcmpl-{name}"), (b"\1\0\0\0\2\0\0\0", b"\3\0\0\0")
    return EndedAnswer(*ids, None, Sampling(), *tokens, "stop", 5, sketches)


def names(call: "Future[dict[str, Any]]") -> list[str]:
    return [each["request_id"] for each in call.result(timeout=0)["answers"]]


def test_an_idle_core_hands_over_at_once(core: Core, collector: AnswerCollector) -> None:
    call = collector.wait()
    core.idle()
    assert not call.done()
    collector.ended(answer("a"))
    core.idle()
    assert call.result(timeout=0) == {"answers": [asdict(answer("a", b"a"))], "dropped": 0}


def test_answers_wait_for_a_caller(core: Core, collector: AnswerCollector) -> None:
    collector.ended(answer("a"))
    core.idle()
    collector.stepped()
    assert core.asked == []
    call = collector.wait()
    core.idle()
    assert names(call) == ["a"]


def test_during_chat_one_question_serves_many_answers(
    core: Core, collector: AnswerCollector
) -> None:
    call = collector.wait()
    collector.ended(answer("a"))
    collector.stepped()
    assert not call.done()
    collector.ended(answer("b"))
    collector.stepped()
    assert names(call) == ["a"]
    call = collector.wait()
    collector.stepped()
    collector.ended(answer("c"))
    core.now += COLLECT_S
    collector.stepped()
    assert not call.done()
    collector.stepped()
    assert names(call) == ["b", "c"]
    assert [wanted for wanted, _alive in core.asked] == [["a"], ["b", "c"]]


def test_workers_keep_rows_of_running_requests_and_of_later_collections(
    core: Core, collector: AnswerCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_COLLECTED", 2)
    for name in ("a", "b", "c"):
        collector.ended(answer(name))
    first = collector.wait()
    core.idle()
    second = collector.wait()
    core.idle()
    assert [names(first), names(second)] == [["a", "b"], ["c"]]
    assert core.asked == [(["a", "b"], ["running", "c"]), (["c"], ["running"])]


def test_the_oldest_answers_are_dropped_and_counted(
    core: Core, collector: AnswerCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ANSWERS", 2)
    for name in ("a", "b", "c"):
        collector.ended(answer(name))
    call = collector.wait()
    core.idle()
    assert names(call) == ["b", "c"]
    assert call.result()["dropped"] == 1


def test_a_later_call_takes_the_place_of_one_whose_client_is_gone(
    core: Core, collector: AnswerCollector
) -> None:
    gone = collector.wait()
    collector.ended(answer("a"))
    collector.stepped()
    call = collector.wait()
    assert names(gone) == []
    core.idle()
    assert names(call) == ["a"]


def test_answers_without_rows_are_handed_over_as_such(
    core: Core, collector: AnswerCollector, caplog: pytest.LogCaptureFixture
) -> None:
    core.error = RuntimeError("a worker failed")
    call = collector.wait()
    collector.ended(answer("a"))
    core.idle()
    (wire,) = call.result(timeout=0)["answers"]
    assert wire["sketches"] is None
    assert "a worker failed" in caplog.text


def test_an_answer_survives_the_way_between_processes() -> None:
    made = answer("a", b"rows")
    assert EndedAnswer.from_wire(asdict(made)) == made
    assert made.wanted == Wanted("a", 1, 1)


@pytest.mark.parametrize(
    ("external", "internal", "siblings", "expected"),
    [
        ("chatcmpl-x", "chatcmpl-x-0123abcd", 1, ("chatcmpl-x", 0)),
        ("chatcmpl-7-2", "chatcmpl-7-2-0123abcd", 1, ("chatcmpl-7-2", 0)),
        ("chatcmpl-x_1", "3_chatcmpl-x_1-0123abcd", 4, ("chatcmpl-x_1", 3)),
        ("cmpl-x-0", "cmpl-x-0-0123abcd", 1, ("cmpl-x", 0)),
        ("cmpl-x-2", "1_cmpl-x-2-0123abcd", 3, ("cmpl-x", 7)),
        ("resp_x_1_0", "resp_x_1_0-0123abcd", 1, ("resp_x_1", 0)),
        ("cmpl-a\nb-5-1", "cmpl-a\nb-5-1-0123abcd", 1, ("cmpl-a\nb-5", 1)),
    ],
)
def test_the_response_and_choice_of_a_request(
    external: str, internal: str, siblings: int, expected: tuple[str, int]
) -> None:
    assert response_of(external, internal, siblings) == expected
