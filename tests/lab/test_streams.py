"""Streamed chats against a stub server, and the times of their tokens."""

import asyncio

import httpx
import pytest

from proofserve_lab.chats import Call, Stream, chat, stream_answer, tokens_between
from support.stub_node import Habits, stub_node


def streamed(url: str, call: Call) -> Stream:
    async def ask() -> Stream:
        async with httpx.AsyncClient(base_url=url) as http:
            return await stream_answer(http, call)

    return asyncio.run(ask())


@pytest.mark.parametrize("per_event", [1, 3])
def test_every_token_is_counted_also_if_several_come_at_once(per_event: int) -> None:
    with stub_node(Habits(tokens_per_event=per_event)) as (_, url):
        found = streamed(url, chat("stub", "hello", 8))
    assert found.error is None
    assert found.count == 8
    assert len(found.tokens) == -(-8 // per_event)
    assert all(gap >= 0 for gap in found.gaps(0, float("inf")))


@pytest.mark.parametrize(
    ("habits", "reason"),
    [
        (Habits(chat_error=503), "503"),
        (Habits(finish_reason="abort"), "finish_reason abort"),
        (Habits(cuts_streams=True), "ended before"),
    ],
    ids=["refused", "aborted", "cut off"],
)
def test_an_answer_that_is_not_whole_has_an_error(habits: Habits, reason: str) -> None:
    with stub_node(habits) as (_, url):
        found = streamed(url, chat("stub", "hello", 8))
    assert reason in (found.error or "")


def test_a_server_that_is_not_there_is_an_error_too() -> None:
    assert "/v1/chat/completions" in (streamed("http://127.0.0.1:9", chat("m", "x", 4)).error or "")


def test_a_gap_belongs_to_the_span_in_which_its_token_came() -> None:
    stream = Stream([(1.0, 1), (1.5, 1), (3.0, 3), (4.0, 1)])
    assert stream.gaps(0.0, 2.0) == [0.5]
    # Of three tokens in one event two came with the one before them.
    assert stream.gaps(2.0, 4.0) == [1.5, 0.0, 0.0]
    # The first token of an answer has no token before it.
    assert stream.gaps(1.0, 1.5) == []


def test_tokens_between_two_instants_are_those_of_all_streams() -> None:
    streams = [Stream([(1.0, 1), (2.0, 4)]), Stream([(1.9, 2), (3.0, 8)]), Stream(error="503")]
    assert tokens_between(streams, 1.5, 3.0) == 6
