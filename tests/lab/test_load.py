import gc
import time

import httpx
import pytest

from proofserve_lab import chats as load
from proofserve_lab.chats import (
    Call,
    ClosedLoop,
    Reply,
    ask_all,
    ask_one,
    chat,
    rate_of_completions,
    reading_chat,
)
from support.pace import PACE
from support.stub_node import Habits, stub_node


def reply(began: float, ended: float, tokens: int) -> Reply:
    return Reply(("",), 0, tokens, began, ended)


def completion(r: Reply) -> int:
    return r.completion_tokens


def test_a_queue_that_is_still_young_does_not_inflate_a_rate() -> None:
    # Four sent at once and served one after the other, a second and 40 tokens each; a client
    # with an answer sends the next.
    replies = [reply(max(0, end - 4), end, 40) for end in range(1, 30)]
    assert rate_of_completions(replies, 4, 12.5, completion) == pytest.approx(40)


def test_a_slow_server_is_measured_by_the_next_completion() -> None:
    replies = [reply(0, 10, 40), reply(0, 20, 40), reply(10, 30, 40)]
    assert rate_of_completions(replies, 2, 21, completion) == pytest.approx(4)


def test_replies_come_in_the_order_of_the_calls() -> None:
    with stub_node() as (_, url):
        calls = [chat("stub", f"say {number}", 20 - number) for number in range(10)]
        counted: list[int] = []
        replies = ask_all(url, calls, 4, lambda: counted.append(1))
    assert [r.texts for r in replies] == [(f"say {number}",) for number in range(10)]
    assert len(counted) == 10
    assert all(r.error is None and r.seconds > 0 for r in replies)


def test_a_refusal_is_a_reply_with_the_servers_words() -> None:
    with stub_node(Habits(chat_error=503)) as (_, url):
        (r,) = ask_all(url, [chat("stub", "hello", 4)], 1)
    assert r.error is not None
    assert "503" in r.error
    assert "no chat today" in r.error


def test_a_server_that_is_not_there_is_a_reply_too() -> None:
    (r,) = ask_all("http://127.0.0.1:9", [chat("stub", "hello", 4)], 1)
    assert r.error is not None
    assert "/v1/chat/completions" in r.error


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_aborted_request_is_an_error(reason: str) -> None:
    with stub_node(Habits(finish_reason=reason)) as (_, url):
        (r,) = ask_all(url, [chat("stub", "hello", 4)], 1)
    assert r.error == f"finish_reason {reason}"


def test_a_closed_loop_keeps_its_clients_busy_and_answers_everything() -> None:
    with stub_node() as (node, url):
        numbers: list[int] = []

        def call(number: int) -> Call:
            numbers.append(number)
            return reading_chat("stub", number, 40)

        with ClosedLoop(url, call, 3, ask_one) as loop:
            loop.settle(0.3)
            # Of three clients one has an answer, so all of them have sent.
            assert len(numbers) > 3
            assert node.chatting <= 3
        assert node.chatting == 0
    assert numbers == list(range(len(loop.replies)))
    assert len(loop.replies) > 3


def test_leaving_by_an_error_drops_what_is_in_flight() -> None:
    def interrupted(url: str) -> None:
        with ClosedLoop(url, lambda _: chat("stub", "slow", 60), 2, ask_one):
            time.sleep(0.2)
            raise KeyError

    with stub_node(Habits(chat_tokens=1.0)) as (_, url):
        began = time.monotonic()
        with pytest.raises(KeyError):
            interrupted(url)
        assert time.monotonic() - began < 10 * PACE


def test_a_loop_that_breaks_says_so() -> None:
    def broken(_number: int) -> Call:
        raise RuntimeError("no such call")

    def loaded(url: str) -> None:
        with ClosedLoop(url, broken, 1, ask_one) as loop:
            loop.settle(0.0)

    with stub_node() as (_, url), pytest.raises(ExceptionGroup) as caught:
        loaded(url)
    assert caught.group_contains(RuntimeError, match="no such call")


def test_lengths_differ_so_that_a_load_is_steady() -> None:
    calls = [reading_chat("stub", number, 100) for number in range(200)]
    words = {len(call.body["messages"][0]["content"].split()) for call in calls}
    # The number of the chat is a word of its own.
    assert min(words) >= 1 + 50
    assert max(words) <= 1 + 150
    assert len(words) > 50
    assert {call.body["max_tokens"] for call in calls} == set(range(8, 25))


def test_the_stub_speaks_http() -> None:
    with stub_node() as (_, url):
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "stub"


def test_an_exit_that_strikes_inside_a_task_is_no_forgotten_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def struck(_http: httpx.AsyncClient, _call: Call) -> Reply:
        raise SystemExit(130)

    monkeypatch.setattr(load, "ask_one", struck)
    with pytest.raises(SystemExit):
        ask_all("http://127.0.0.1:9", [Call("/", {})] * 3, 1)
    # A task whose exception was never read warns when it is collected.
    gc.collect()
    assert caplog.text == ""
